"""Values on their way from one stage to another: tensors, and what a forward computes beside them (sizes, flags).

A parcel is a short description, in msgpack, of a list of values, followed by the tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from paceline.errors import ModelError
from paceline.exchange.mailboxes import Peers

_PLAIN = (type(None), bool, int, float, str)


def send(peers: Peers, values: Sequence[Any], to: int) -> list[torch.Tensor]:
    """Returns the tensors among the values that require a gradient."""
    words, tensors = pack(values)
    peers.send(torch.frombuffer(bytearray(words), dtype=torch.uint8), to)
    for tensor in tensors:
        peers.send(tensor, to)
    return [tensor for tensor in tensors if tensor.requires_grad]


def receive(peers: Peers, source: int) -> tuple[list[Any], list[torch.Tensor]]:
    """What the other has sent. Tensors that required a gradient there require one here: these, in the same order."""
    description = msgspec.msgpack.decode(peers.receive(source).numpy().tobytes())
    leaves: list[torch.Tensor] = []

    def arriving() -> Iterator[torch.Tensor]:
        while True:
            yield peers.receive(source)

    tensors = arriving()
    return [_unpacked(entry, tensors, leaves) for entry in description], leaves


def pack(values: Sequence[Any]) -> tuple[bytes, list[torch.Tensor]]:
    """The description, and the tensors; ModelError for a value that cannot travel."""
    tensors: list[torch.Tensor] = []
    words = msgspec.msgpack.encode([_packed(value, tensors) for value in values])
    return words, tensors


def _packed(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _stays("a sparse tensor")
        tensors.append(value)
        return ["tensor", value.requires_grad]
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, (torch.dtype, torch.device)):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    if isinstance(value, slice):
        return ["slice", [_packed(part, tensors) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, dict):
        if not all(type(key) in _PLAIN for key in value):
            raise _stays("a dict whose keys are not plain")
        return ["dict", [[key, _packed(entry, tensors)] for key, entry in value.items()]]
    if isinstance(value, (list, tuple)):
        # Results of torch, such as of max(dim), are tuples with names, which a forward uses by number or by name.
        if type(value).__module__ == "torch.return_types":
            return [f"torch.{type(value).__name__}", [_packed(entry, tensors) for entry in value]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            raise _stays(f"a {type(value).__name__}")
        return ["list" if isinstance(value, list) else "tuple", [_packed(entry, tensors) for entry in value]]
    raise _stays(f"a {type(value).__name__}")


def _unpacked(entry: Any, tensors: Iterator[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
    if not isinstance(entry, list):
        return entry
    kind, content = entry
    if kind == "tensor":
        tensor = next(tensors)
        if content:
            leaves.append(tensor.requires_grad_())
        return tensor
    if kind == "size":
        return torch.Size(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "dict":
        return {key: _unpacked(value, tensors, leaves) for key, value in content}
    values = [_unpacked(value, tensors, leaves) for value in content]
    if kind == "slice":
        return slice(*values)
    if kind.startswith("torch."):
        return getattr(torch.return_types, kind.removeprefix("torch."))(values)
    return values if kind == "list" else tuple(values)


def _stays(what: str) -> ModelError:
    return ModelError("model", what, "only tensors, numbers, texts and lists of them can go from one stage to another")
