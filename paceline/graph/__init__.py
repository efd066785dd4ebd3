"""A computation of the user's, the loss of a batch above all, as one graph of ATen operators.

call_graph       the graph: what it takes, its operators, what it returns, in which modes they run
capture          from a function, a model and its inputs to the graph, by torch.export
shapes           one computation in many shapes: sizes that are left open, and numbers in their places
inputs           what a function is given, as tensors and all else
whole            modules and functions that are one operator each: `pl.whole`
drawn_numbers    what is drawn at random, and is below nothing
proof            whether the graph computes what the function computes
noted_operators  what a computation comes to, without computing it: the proof, and a graph's name on disk
python_effects   what is in no graph: a function prints, it counts; numbers that change
in_place         changes in place that nobody sees, as operators that give something new
kept             graphs on disk, so that the second run of a script need not capture again
written          a graph as bytes and back
operators        what can be said of one operator: its name, what it changes, what it may share memory with
"""
