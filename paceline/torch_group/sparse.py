"""The sum of sparse tensors: everybody gets everybody's entries, and adds up those that coincide.

DistributedDataParallel asks for it where an embedding has sparse gradients. The ranks may have different entries, and
different numbers of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import ReduceOp

from paceline.torch_group.collectives import Collectives
from paceline.torch_group.errors import CallError


def all_reduce_sparse(collectives: Collectives, tensor: torch.Tensor, op: Any) -> None:
    """Make `tensor` the sum (or mean) over all ranks, with the same entries in the same order on all."""
    kind = getattr(op, "op", op)
    mean = kind == ReduceOp.AVG and tensor.dtype.is_floating_point
    if tensor.layout != torch.sparse_coo or not tensor.is_cpu or not (kind == ReduceOp.SUM or mean):
        name = str(kind).rpartition(".")[2]
        raise CallError(
            f"all_reduce by {name} was given a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device.type}: of "
            "sparse tensors there is SUM (and AVG of floats), of layout torch.sparse_coo, on the cpu"
        )
    own = tensor.detach().coalesce()
    shape = torch.tensor([*own.shape, own.sparse_dim(), len(own.values())])
    shapes = [torch.empty_like(shape) for _ in range(collectives.count)]
    collectives.all_gather(shape, shapes)
    for rank, other in enumerate(shapes):  # the same on all ranks
        if not torch.equal(other[:-1], shapes[0][:-1]):
            raise CallError(
                f"rank {rank} calls all_reduce with a sparse tensor of shape {other[:-2].tolist()} while rank 0 has "
                f"{shapes[0][:-2].tolist()}: give tensors of one shape, and as many sparse dims"
            )
    counts = [int(other[-1]) for other in shapes]
    each = math.prod(own.shape[own.sparse_dim() :])
    indices = [torch.empty(own.sparse_dim() * count, dtype=torch.int64) for count in counts]
    values = [torch.empty(each * count, dtype=own.dtype) for count in counts]
    collectives.all_gather(own.indices().contiguous().view(-1), indices)
    collectives.all_gather(own.values().contiguous().view(-1), values)
    whole = torch.sparse_coo_tensor(
        torch.cat([part.view(own.sparse_dim(), -1) for part in indices], 1),
        torch.cat([part.view(-1, *own.shape[own.sparse_dim() :]) for part in values]),
        own.shape,
        check_invariants=False,
    ).coalesce()
    with torch.no_grad():  # of a sparse tensor, detach() would not be the same memory
        tensor.copy_(whole.div_(collectives.count) if mean else whole)
