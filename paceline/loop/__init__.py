"""The training loop, one for all strategies, and what a run knows about itself.

`training_loop` takes samples from a source (`sources`), has an engine (`engine`: what it must do; `solo`: plain torch)
make steps of them, and owns everything in between: where the script stands (`script_position`), the run's state
(`run_state`), forward and backward (`passes`), evaluations (`evaluation`), what `verify` compares (`recorder`).
"""
