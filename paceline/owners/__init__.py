"""Owners: who turns gradients into new parameters.

`engine` is what a trainer needs of them; `solo` is one process, `mirrored` many. `owner` works on its shard chunk by
chunk and takes over from the dead; `state` and `optimizer` apply the user's own optimizer to parts of an arena;
`gradients` collects, `reducer` averages in place for `distribute`, `courier` sends between hosts; `batchnorm` makes
statistics exact; `build` and `opening` are how replicas come to share a model.
"""
