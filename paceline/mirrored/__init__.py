"""Mirrored replicas: parameters lie once a host, every replica owns a shard and updates it.

`engine` makes a step of a list of parts (`step_parts`): `statistics` of BatchNorm, `model_part` (all of the model, or
one device's part), `between_hosts` or (every few steps only) `local_steps` or (with one other host) `gossip`, `joining`
(a replica that was started again). `step_totals` is what a step has come to, `whole_state` what a run has, for
checkpoints. `wire_memory` is what a wire remembers from step to step. `owner` sums and updates a shard and takes over
those of the dead, `shared_model` is how replicas come to share one model, `reducer` averages in place for
`pl.distribute`, `opening` is how the replicas find each other. Whose samples are whose is said in `loop/lockstep.py`.
"""
