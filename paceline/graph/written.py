"""A graph as bytes and back: to keep it, without pickle.

Code is made of a graph that is read, and so every name in it is checked: those of values are identifiers, those of
arguments are in the operator's schema, and operators are torch's own (`NAMESPACES`), but for those that touch files. A
file that somebody has altered can compute something else, which the proof notices, and runs no code.

What cannot be written that way (an operator that is a function of ours or of the user's, a class that is returned) is
not written: `CannotBeWritten`.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.inputs import take_apart
from paceline.graph.noted_operators import CannotFollow, bytes_of
from paceline.torch_private import is_operator, schema_of

_CONSTANT = (bool, int, float, str, type(None))
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
NAMESPACES = ("aten", "torchvision")
_TOUCH_FILES = ("filename",)  # arguments that tell it


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
        _check_name(entry.name)
        if entry.operator:
            target, args, kwargs = _operator(entry.operator), _back(entry.args, made), _back(entry.kwargs, made)
            _check_arguments(target, kwargs)
            node = graph.create_node("call_function", target, args, kwargs, entry.name)
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
    if is_operator(node.target) and _is_allowed(node.target):
        return str(node.target)
    raise CannotBeWritten(str(node.target))


def _operator(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise ValueError(f"{name} is not torch's")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not is_operator(found) or not _is_allowed(found):
        raise ValueError(f"{name} is no operator that may be read")
    return found  # type: ignore[no-any-return]


def _is_allowed(target: Any) -> bool:
    schema = schema_of(target)
    touches_files = any(argument.name in _TOUCH_FILES for argument in schema.arguments)
    return schema.name.partition("::")[0] in NAMESPACES and not touches_files


def _check_name(name: str) -> None:
    """Refuses what would be more than a name in the code that is made of a graph."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(f"{name} is no name")


def _check_arguments(target: Any, kwargs: Any) -> None:
    schema = schema_of(target)
    allowed = () if schema is None else [argument.name for argument in schema.arguments]
    if not isinstance(kwargs, dict) or not all(name in allowed for name in kwargs):
        raise ValueError(f"{target} has no such arguments")


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
        return _of_torch(entries[0])
    if kind == "dict":
        return {_back(key, made): _back(entry, made) for key, entry in entries}
    return _KINDS[kind](*(_back(entry, made) for entry in entries))


def _of_torch(name: str) -> Any:
    """Returns a type, a layout or a memory format."""
    found = vars(torch)[name]
    if not isinstance(found, _OF_TORCH):
        raise ValueError(f"torch.{name} is no argument")
    return found


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
    return torch.empty_strided(shape, strides, dtype=_of_torch(kind), device="meta")


def _same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are the same memory, seen alike."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _with_values(tensor: torch.Tensor) -> Any:
    if type(tensor) is not torch.Tensor:
        raise CannotBeWritten(f"a {type(tensor).__name__}")
    try:
        return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), bytes_of(tensor)]
    except CannotFollow as error:
        raise CannotBeWritten("a tensor that is none of torch's own, or very large") from error


def _tensor(entry: Any) -> torch.Tensor:
    shape, kind, content = entry
    if not content:
        return torch.empty(0, dtype=_of_torch(kind)).view(shape)
    return torch.frombuffer(bytearray(content), dtype=_of_torch(kind)).view(shape)
