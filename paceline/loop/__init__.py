"""The training loop, one for all strategies, and what a run knows about itself.

`training_loop` takes samples from a source (`lockstep`: of all replicas that take the same steps), has an engine
(`engine`: what it must do; `solo`: plain torch) make steps of them, a `batch` at a time, and owns everything in
between: where the script stands (`script_position`), the run's state (`run_state`), forward and backward (`passes`),
evaluations (`evaluation`), what is compared with another run (`recorder`).
"""
