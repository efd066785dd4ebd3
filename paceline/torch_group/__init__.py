"""A backend for programs of torch.distributed (`paceline.torch_backend`): shared memory instead of sockets.

`rank_group` is ranks that found each other through torch's store and that nobody supervises, `space` the shared memory
of their collectives, `flat` how tensors lie in it, `tagged_messages` what they send to one another; `process_group` is
what torch sees of all that.
"""
