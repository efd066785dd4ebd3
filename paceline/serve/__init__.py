"""Serving: single requests answered by a model that is cut over several devices.

`load` makes a `Predictor` in a plain script; `trainer.predictor()` gives one inside a run.
"""
