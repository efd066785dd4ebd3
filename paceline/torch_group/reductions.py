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

    def __init__(self, kind: Any, dtype: torch.dtype, factor: Any = None) -> None:
        self._operator = _OPERATORS[kind]
        self._mean = kind == ReduceOp.AVG
        self._factor = factor
        self._widen = dtype.is_floating_point and dtype.itemsize < 4
        # All ranks must reduce in the same way: the operation as a number that they compare.
        self.code = int(kind) | (0 if factor is None else hash(float(factor)) & 0xFFF) << 4

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
        if self._mean:
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
    found = _tried(kind, dtype)
    if found is None:
        name = str(kind).rpartition(".")[2]
        raise CallError(
            f"ReduceOp.{name} was given a tensor of {dtype}, for which it does not exist: convert the tensor"
        )
    # What it would be pickled as: torch 2.9 has no other way to ask for the factor.
    factor = op.__getstate__()[1] if kind == ReduceOp.PREMUL_SUM else None
    return found if factor is None else Reduction(kind, dtype, factor)


@functools.cache
def _tried(kind: Any, dtype: torch.dtype) -> Reduction | None:
    """The reduction, if torch can do it: it is tried once, on a tensor of one element."""
    if kind not in _OPERATORS:
        return None
    one = torch.ones(1).to(dtype)
    try:
        Reduction(kind, dtype, 0.5 if kind == ReduceOp.PREMUL_SUM else None)([one, one], torch.empty_like(one))
    except (RuntimeError, TypeError):  # which of the two depends on torch's version
        return None
    return Reduction(kind, dtype)
