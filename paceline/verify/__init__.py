"""The promise that strategies change speed and never results, as something that can be run.

The training loop's recorder writes down every tensor of a run's first steps; `compare` finds the first that differs
between two runs, and `gain` says what an optimizer may make of the rounding of gradients.
"""
