"""Serving: requests answered by a trained model, which may be cut over several devices.

`load` makes a `Predictor` in a plain script; `trainer.predictor()` gives one inside a run. A `model_process` answers for
one model in a process of its own, from inside `answering`, with tensors that lie in `shared_values`.
"""
