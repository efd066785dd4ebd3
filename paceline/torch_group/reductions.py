"""How the contributions of several ranks become one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from paceline.torch_group.errors import CallError
from paceline.torch_group.flat_tensors import check

_OPERATORS: dict[Any, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class Reduction:
    """An operation of torch.distributed on tensors of one type; floats of 16 bits and less are reduced in float32."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        self.kind = getattr(op, "op", op)
        self._factor = op.factor if self.kind == ReduceOp.PREMUL_SUM else None
        self._operator = _OPERATORS[self.kind]
        self._widen = dtype.is_floating_point and dtype.itemsize < 4
        # All ranks must reduce in the same way: the operation as a number that they compare.
        self.code = int(self.kind) | (0 if self._factor is None else hash(float(self._factor)) & 0xFFF) << 4

    def __call__(self, found: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Put all contributions together in the order of the ranks, into a tensor of their size."""
        if self._widen and len(found) > 1:
            found = [part.float() for part in found]
        total = into if found[0].dtype == into.dtype else torch.empty_like(found[0])
        if len(found) == 1:
            total.copy_(found[0])
        else:
            self._operator(found[0], found[1], out=total)
        for part in found[2:]:
            self._operator(total, part, out=total)
        if self.kind == ReduceOp.AVG:
            total.div_(len(found))
        elif self._factor is not None:
            total.mul_(self._factor)
        if total is not into:
            into.copy_(total)


def reduction(op: Any, tensors: Sequence[torch.Tensor]) -> Reduction:
    """The reduction of these tensors by `op`, or a sentence why there is none."""
    check(tensors)
    dtype = tensors[0].dtype
    kind = getattr(op, "op", op)
    if not _possible(kind, dtype):
        name = str(kind).rpartition(".")[2]
        raise CallError(
            f"ReduceOp.{name} was given a tensor of {dtype}, for which it does not exist: convert the tensor"
        )
    return Reduction(op, dtype)


@functools.cache
def _possible(kind: Any, dtype: torch.dtype) -> bool:
    """Whether torch can do it, found out by trying."""
    if kind not in _OPERATORS:
        return False
    op = ReduceOp.SUM if kind == ReduceOp.PREMUL_SUM else kind
    if kind == ReduceOp.PREMUL_SUM and not (dtype.is_floating_point or dtype.is_complex):
        return False
    one = torch.ones(1).to(dtype)
    try:
        Reduction(op, dtype)([one, one], torch.empty_like(one))
    except (RuntimeError, TypeError):
        return False
    return True
