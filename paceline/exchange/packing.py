"""Values on their way from one device to another: tensors, and what goes with them (sizes, flags, lists, dicts).

A packed value is a short description, in msgpack, followed by the tensors in it. The kinds are fixed, and there is no
pickle: what is not of one of them is refused on the sender's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from paceline.exchange.mailboxes import Peers

Packed = tuple[bytes, list[torch.Tensor]]
_PLAIN = (type(None), bool, int, float, str)


class CannotTravel(Exception):
    """A value has something in it that cannot go to another device; the text says what."""


def pack(value: Any) -> Packed:
    """Returns the description of a value, and the tensors in it.

    >>> description, tensors = pack(((torch.ones(2), [1, None]), {"scale": 0.5}))
    >>> unpack(description, iter(tensors))[0]
    ((tensor([1., 1.]), [1, None]), {'scale': 0.5})
    """
    tensors: list[torch.Tensor] = []
    try:
        return msgspec.msgpack.encode(_described(value, tensors)), tensors
    except OverflowError:
        raise CannotTravel("a number of more than 64 bits") from None


def unpack(description: bytes, tensors: Iterator[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Returns the value, and those of its tensors that required a gradient where they came from: here they do, too."""
    leaves: list[torch.Tensor] = []
    return _restored(msgspec.msgpack.decode(description), tensors, leaves), leaves


def send(peers: Peers, packed: Packed, to: int) -> None:
    """Sends a packed value to another device, and returns as soon as it is copied."""
    description, tensors = packed
    peers.send(torch.frombuffer(bytearray(description), dtype=torch.uint8), to)
    for tensor in tensors:
        peers.send(tensor, to)


def receive(peers: Peers, source: int) -> tuple[Any, list[torch.Tensor]]:
    """Returns the next value that the other device has sent, as `unpack` does."""

    def arriving() -> Iterator[torch.Tensor]:
        while True:
            yield peers.receive(source)

    tensors = arriving()
    return unpack(next(tensors).numpy().tobytes(), tensors)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    def each(values: Any) -> list[Any]:
        return [_described(entry, tensors) for entry in values]

    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise CannotTravel("a sparse tensor")
        tensors.append(value)
        return ["tensor", value.requires_grad]
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, (torch.dtype, torch.device)):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if isinstance(value, slice):
        return ["slice", each((value.start, value.stop, value.step))]
    if isinstance(value, dict):
        return ["dict", [each(item) for item in value.items()]]
    if isinstance(value, list):
        return ["list", each(value)]
    # Results of torch, such as of max(dim), are tuples with names, which a forward uses by number or by name.
    if kind.__module__ == "torch.return_types":
        return [f"torch.{kind.__name__}", each(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return ["tuple", each(value)]
    raise CannotTravel(f"a {kind.__name__}")


def _restored(entry: Any, tensors: Iterator[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
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

    def each(entries: list[Any]) -> list[Any]:
        return [_restored(one, tensors, leaves) for one in entries]

    if kind == "dict":
        return dict(each(item) for item in content)
    values = each(content)
    if kind == "slice":
        return slice(*values)
    if kind.startswith("torch."):
        return getattr(torch.return_types, kind.removeprefix("torch."))(values)
    return values if kind == "list" else tuple(values)
