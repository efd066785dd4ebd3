"""Shared memory for torch's own distributed programs: DistributedDataParallel, DTensor, FSDP, pipelining.

    import paceline.torch_backend
    paceline.torch_backend.register()
    torch.distributed.init_process_group("paceline")

The processes of one host then exchange tensors through shared memory, and what is built on torch.distributed need not
know. Subgroups and device meshes follow the default group.
"""

from __future__ import annotations

from torch import distributed as dist

from paceline.machine import check_shared_words
from paceline.torch_group.process_group import NAME, SharedMemoryGroup
from paceline.torch_private import leave_unrecorded


def register() -> str:
    """Make the backend known to torch.distributed, for tensors on the CPU; its name, "paceline". May be repeated."""
    check_shared_words("the backend paceline cannot be used")
    leave_unrecorded(NAME)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
    return NAME
