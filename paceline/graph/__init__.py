"""A computation of the user's, the loss of a batch above all, as one graph of ATen operators.

call_graph   the graph: what it takes, its operators, what it returns, in which modes they run
capture      from a function, a model and its inputs to the graph, by torch.export
inputs       what a function is given, as tensors and all else
proof        whether the graph computes what the function computes
operators    what can be said of one operator: its name, what it changes, what it may share memory with
"""
