"""The user's optimizer on parts of a model, and how gradients get to it: what all strategies share.

`models` names a model's parameters, `trial` finds out what an optimizer looks at and keeps, `state` where that lies,
`shard_optimizer` applies it to pieces of an arena, `gradients` collects what backward makes where it is to go
(`direct_gradients`: without a copy; `postponed`: when a device has time for it), `model_in_arena` makes shared memory
the home of a model, `batchnorm` has statistics over all parts of a batch.
"""
