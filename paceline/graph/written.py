"""A graph as bytes and back: to keep it, without pickle. Operators are written by their names, and only those of
torch's registry are read, so a file that somebody has altered can compute something else but run no code.

What cannot be written that way (an operator that is a function of ours, a class that is returned) is not written:
`CannotBeWritten`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.inputs import take_apart
from paceline.torch_private import is_operator

_CONSTANT = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class CannotBeWritten(Exception):
    """A graph has something that only this process knows."""


class _Node(msgspec.Struct, array_like=True):
    name: str
    operator: str  # empty: a placeholder
    args: Any
    kwargs: Any
    mode: Any
    modules: list[str]
    value: Any


class _Graph(msgspec.Struct, array_like=True):
    nodes: list[_Node]
    inputs: list[int]
    tensors: dict[str, int]
    constants: list[tuple[int, Any]]
    returned: list[Any]
    returned_as: Any


def written(call: CallGraph, live: Sequence[torch.Tensor]) -> bytes:
    """Returns a graph as bytes. Its constants that are among the `live` tensors are written as their numbers: in
    another run others stand there."""
    alive = {_same(tensor): place for place, tensor in enumerate(live)}
    number = {node: position for position, node in enumerate(n for n in call.graph.nodes if n.op != "output")}
    plain = _Plain(number)
    nodes = [
        _Node(
            node.name,
            _operator_name(node),
            plain.of(node.args),
            plain.of(node.kwargs),
            plain.of(node.meta.get("mode")),
            node.meta.get("modules", []),
            _without_values(call.values.get(node)),
        )
        for node in number
    ]
    graph = _Graph(
        nodes,
        [number[node] for node in call.inputs],
        {name: number[node] for name, node in call.tensors.items()},
        [
            (number[node], alive[_same(tensor)] if _same(tensor) in alive else _with_values(tensor))
            for node, tensor in call.constants.items()
        ],
        [plain.of(value) for value in call.returned],
        plain.of(call.structure.fill([_Place(at) for at in range(len(call.returned))])),  # type: ignore[misc]
    )
    return msgspec.msgpack.encode(graph)


def read(content: bytes, live: Sequence[torch.Tensor]) -> CallGraph:
    """Returns the graph of some bytes that `written` has given, with this run's `live` tensors."""
    found = msgspec.msgpack.decode(content, type=_Graph)
    graph = fx.Graph()
    made: list[fx.Node] = []
    values: dict[fx.Node, Any] = {}
    for entry in found.nodes:
        if entry.operator:
            args, kwargs = _back(entry.args, made), _back(entry.kwargs, made)
            node = graph.create_node("call_function", _operator(entry.operator), args, kwargs, entry.name)
            node.meta = {"mode": _back(entry.mode, made), "modules": entry.modules}
        else:
            node = graph.placeholder(entry.name)
        made.append(node)
        values[node] = _shaped(entry.value)
    returned = [_back(value, made) for value in found.returned]
    graph.output(tuple(returned))
    empty = [torch.empty(0)] * len(returned)
    _, structure = take_apart(_back(found.returned_as, empty), "output")
    return CallGraph(
        graph,
        [made[number] for number in found.inputs],
        {name: made[number] for name, number in found.tensors.items()},
        {made[place]: live[entry] if isinstance(entry, int) else _tensor(entry) for place, entry in found.constants},
        returned,
        structure,
        values,
    )


# ── operators ────────────────────────────────────────────────────────────────────────────────────────────────


def _operator_name(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.target is operator.getitem:
        return "getitem"
    if is_operator(node.target):
        return str(node.target)
    raise CannotBeWritten(str(node.target))


def _operator(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    if not is_operator(found):
        raise ValueError(f"{name} is no operator")
    return found  # type: ignore[no-any-return]


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────


class _Place:
    """Where a tensor stands in what is returned."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Plain:
    """Values in lists, numbers and words: a constant is itself, all else a list whose first element says what it is."""

    def __init__(self, number: dict[fx.Node, int]) -> None:
        self._number = number

    def of(self, value: Any) -> Any:
        if type(value) in _CONSTANT:
            return value
        if isinstance(value, fx.Node):
            return ["node", self._number[value]]
        if isinstance(value, _Place):
            return ["node", value.number]
        if type(value) in (tuple, list, torch.Size, fx.immutable_collections.immutable_list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return [kind, *map(self.of, value)]
        if type(value) in (dict, fx.immutable_collections.immutable_dict):
            return ["dict", *([self.of(key), self.of(entry)] for key, entry in value.items())]
        if isinstance(value, slice):
            return ["slice", self.of(value.start), self.of(value.stop), self.of(value.step)]
        if type(value) is complex:
            return ["complex", value.real, value.imag]
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, _OF_TORCH):
            return ["torch", str(value).removeprefix("torch.")]
        raise CannotBeWritten(f"a {type(value).__name__}")


_KINDS: dict[str, Callable[..., Any]] = {
    "tuple": lambda *entries: entries,
    "list": lambda *entries: list(entries),
    "dict": lambda *entries: dict(entries),
    "slice": slice,
    "complex": complex,
    "device": torch.device,
}


def _back(value: Any, made: list[Any]) -> Any:
    """Returns what `_Plain.of` was given; nodes, or tensors, are those that were `made`."""
    if not isinstance(value, list):
        return value
    kind, *entries = value
    if kind == "node":
        return made[entries[0]]
    if kind == "torch":
        found = getattr(torch, entries[0])
        if not isinstance(found, _OF_TORCH):
            raise ValueError(f"torch.{entries[0]} is no argument")
        return found
    if kind == "dict":
        return {_back(key, made): _back(entry, made) for key, entry in entries}
    return _KINDS[kind](*(_back(entry, made) for entry in entries))


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────


def _without_values(value: Any) -> Any:
    """Returns shape, strides and type of a tensor, or of those in a tuple."""
    if isinstance(value, torch.Tensor):
        sizes = [*value.shape, *value.stride()]
        if not all(type(size) is int for size in sizes):
            raise CannotBeWritten("a size that follows from values")
        return ["tensor", sizes[: value.dim()], sizes[value.dim() :], str(value.dtype).removeprefix("torch.")]
    if isinstance(value, (tuple, list)):
        return ["tuple", *map(_without_values, value)]
    if type(value) in _CONSTANT:
        return value
    raise CannotBeWritten(f"a {type(value).__name__}")


def _shaped(entry: Any) -> Any:
    if not isinstance(entry, list):
        return entry
    if entry[0] == "tuple":
        return tuple(map(_shaped, entry[1:]))
    _, shape, strides, kind = entry
    return torch.empty_strided(shape, strides, dtype=getattr(torch, kind), device="meta")


def _same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are the same memory, seen alike."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _with_values(tensor: torch.Tensor) -> Any:
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise CannotBeWritten(f"a {type(tensor).__name__} on {tensor.device}")
    content = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), content.numpy().tobytes()]


def _tensor(entry: Any) -> torch.Tensor:
    shape, kind, content = entry
    dtype = getattr(torch, kind)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
