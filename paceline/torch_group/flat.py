"""Tensors as flat runs of elements, and how those of several ranks become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from paceline.errors import PacelineError

Reduce = Callable[[Sequence[torch.Tensor], torch.Tensor], None]  # from all contributions, into a tensor of their size
_SHORT = (torch.float16, torch.bfloat16)  # added up in float32


class Flat:
    """A tensor to be written, as a flat one: itself where it is contiguous, else a copy that is written back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.data
        self._contiguous = self._tensor.contiguous()
        self.flat = self._contiguous.view(-1)

    def write_back(self) -> None:
        if self._contiguous.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._contiguous)

    def __enter__(self) -> torch.Tensor:
        return self.flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.write_back()


class Flats:
    """Several of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flats = [Flat(tensor) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [flat.flat for flat in self._flats]

    def __exit__(self, kind: object, *_: object) -> None:
        for flat in self._flats:
            flat.__exit__(kind)


def read(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is only read, as a flat one."""
    return tensor.data.contiguous().view(-1)


def check(tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            kind = tensor.device.type if tensor.device.type != "cpu" else str(tensor.layout)
            raise PacelineError(f"the backend paceline was given a tensor that is {kind}: give a dense one on the cpu")
        if tensor.dtype != first.dtype:
            raise PacelineError(f"one call has tensors of {first.dtype} and {tensor.dtype}: give them one type")


def same_size(call: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.numel() != other.numel():
        raise PacelineError(f"{call} has an output of {one.numel()} elements for an input of {other.numel()}")


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


def reduction(op: Any, tensors: Sequence[torch.Tensor]) -> Reduce:
    """How contributions are put together."""
    check(tensors)
    kind = getattr(op, "op", op)
    operator, dtype = _OPERATORS[kind], tensors[0].dtype
    if kind == ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
        raise PacelineError(f"ReduceOp.AVG was given a tensor of {dtype}: its mean is not a whole number, use SUM")

    def reduce(found: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        if dtype in _SHORT and len(found) > 1:
            found = [part.float() for part in found]
        total = into if found[0].dtype == into.dtype else torch.empty_like(found[0])
        if len(found) == 1:
            total.copy_(found[0])
        else:
            operator(found[0], found[1], out=total)
        for part in found[2:]:
            operator(total, part, out=total)
        if kind == ReduceOp.AVG:
            total.div_(len(found))
        elif kind == ReduceOp.PREMUL_SUM:
            total.mul_(op.factor)
        if total is not into:
            into.copy_(total)

    return reduce
