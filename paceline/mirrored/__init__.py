"""Mirrored replicas: parameters lie once a host, every replica owns a shard and updates it.

`engine` makes a step of a list of parts (`step_parts`), `owner` sums and updates a shard and takes over those of the
dead, `shared_model` is how replicas come to share one model, `between_hosts` adds up with other hosts during backward,
`reducer` averages in place for `pl.distribute`, `opening` is how the replicas find each other.
"""
