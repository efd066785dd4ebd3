"""Tensors as flat runs of elements, whatever they look like in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.utils.dlpack

from paceline.torch_group.errors import CallError


class FlatTensor:
    """A tensor to be written, as a flat one: itself where it is contiguous, else a copy that is written back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = plain(tensor)
        self._contiguous = self._tensor.contiguous()
        self.flat = self._contiguous.view(-1)
        if self._contiguous is not self._tensor and _expanded(self._tensor):
            raise CallError("a call writes to an expanded tensor, whose elements are one in memory: give a clone of it")

    def write_back(self) -> None:
        if self._contiguous.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._contiguous)

    def __enter__(self) -> torch.Tensor:
        return self.flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.write_back()


class FlatTensors:
    """Several of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [FlatTensor(tensor) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [tensor.flat for tensor in self._tensors]

    def __exit__(self, kind: object, *_: object) -> None:
        for tensor in self._tensors:
            tensor.__exit__(kind)


def _expanded(tensor: torch.Tensor) -> bool:
    return any(length > 1 and not stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without autograd; one of inference mode may be written only there, and this one anywhere."""
    if tensor.is_inference():
        with outside_inference():
            return torch.utils.dlpack.from_dlpack(tensor)
    return tensor.data


def outside_inference() -> AbstractContextManager[object]:
    """Tensors that are made in it may be written later, in whatever mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def read(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is only read, as a flat one."""
    return tensor.data.contiguous().view(-1)


def check(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what is not dense numbers on the CPU, all of one type."""
    if not tensors:
        raise CallError("a call has an empty list of tensors: give at least one")
    dtype = tensors[0].dtype
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise CallError(f"the backend paceline was given {_kind(tensor)}: give a dense tensor on the cpu")
        if tensor.dtype != dtype:
            raise CallError(f"one call has tensors of {dtype} and {tensor.dtype}: give them one type")


def _kind(tensor: torch.Tensor) -> str:
    if not tensor.is_cpu:
        return f"a tensor on {tensor.device.type}"
    if tensor.is_nested:
        return "a nested tensor"
    return "a quantized tensor" if tensor.is_quantized else f"a tensor of layout {tensor.layout}"


def same_size(call: str, output: torch.Tensor, contribution: torch.Tensor) -> None:
    """Refuse an output that its input does not fill."""
    if output.numel() != contribution.numel():
        raise CallError(f"{call} has an output of {output.numel()} elements for an input of {contribution.numel()}")


def one_for_each(call: str, tensors: Sequence[torch.Tensor], ranks: int) -> None:
    """Refuse a list that has not one tensor for each rank."""
    if len(tensors) != ranks:
        raise CallError(f"{call} has a list of {len(tensors)} tensors: give {ranks}, one for each rank of the group")


def equal_parts(call: str, flat: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
    """One part for each rank, all of one length."""
    if flat.numel() % ranks:
        raise CallError(f"{call} has a tensor of {flat.numel()} elements: {ranks} ranks must divide it")
    return list(flat.view(ranks, -1))


def split(
    call: str, flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int] | None, ranks: int
) -> Sequence[torch.Tensor]:
    """One part for each rank, of so many rows of the tensor's first dim; equal ones if no sizes are given."""
    if not sizes:
        return equal_parts(call, flat, ranks)
    rows = tensor.size(0)
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise CallError(f"{call} splits {rows} rows into {list(sizes)}: give {ranks} sizes that add up to the rows")
    return torch.split(flat, [size * (flat.numel() // max(rows, 1)) for size in sizes])
