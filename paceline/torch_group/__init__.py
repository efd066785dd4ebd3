"""A backend for programs of torch.distributed (`paceline.torch_backend`): shared memory instead of sockets.

`rank_group` is ranks that found each other through torch's store and that nobody supervises; `rounds` what they do in
step, `collectives` (and `sparse`) what they exchange in it, `reductions` how contributions become one, `flat_tensors`
how tensors lie in memory; `tagged_messages` what they send to one another. `process_group` and `works` are what torch
sees of all that, `errors` what it is told.
"""
