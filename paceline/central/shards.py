"""What lies on which server: worked out alike by every replica and every server, from one description.

A *spec* describes the parameters of a container, and the optimizer that updates them, as plain data: names, shapes,
types, the optimizer's name and options. Nothing in it can be executed.

The parameters are planned as one flat buffer (`memory/layout.py`) and cut into chunks of at most two megabytes, many
more than there are servers. Neighbouring chunks go to one server, equally many bytes to each, so most tensors are whole
on their server, and large ones are cut:

    flat buffer   │ chunk 0 │ chunk 1 │ chunk 2 │ chunk 3 │ chunk 4 │ …
                  └──── server 0 ─────┴──── server 1 ─────┴── …

A server knows only *pieces*: runs of elements of one tensor (whole tensors, if the optimizer needs them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.layout import Chunk, FlatLayout, Piece, Slot, aligned, assign
from paceline.optim.trial import KNOWN, Sees, options_of

MAP_VERSION = 1
DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
}
# What a server can be asked to run, by name. Names are all that travels.
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    kind.__name__: kind for kind in sorted(KNOWN, key=lambda kind: kind.__name__) if kind is not torch.optim.Muon
}
Option = float | int | bool | str | None | list[float | None]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One trained parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int


class TableSpec(msgspec.Struct, frozen=True, array_like=True):
    """One embedding."""

    name: str
    rows: int
    width: int
    group: int
    initialize: bool  # nobody has values for it: the servers draw them


class OptimizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """An optimizer by name, and the options of its groups."""

    name: str
    groups: list[dict[str, Option]]


class Spec(msgspec.Struct, frozen=True, array_like=True):
    """What a container holds, and how it is spread: every server derives its share from this."""

    tensors: list[TensorSpec]  # in the order of registration
    optimizer: OptimizerSpec
    servers: int
    map_version: int = MAP_VERSION
    tables: list[TableSpec] = []

    def differs_from(self, other: Spec) -> str | None:
        """Return the first thing in which two specs describe another model, in words."""
        for own, its in zip(self.tensors, other.tensors, strict=False):
            if (own.name, own.shape, own.dtype) != (its.name, its.shape, its.dtype):
                return f"{own.name} of shape {own.shape} is {its.name} of shape {its.shape} there"
        if len(self.tensors) != len(other.tensors):
            return f"{len(self.tensors)} tensors are {len(other.tensors)} there"
        if self.optimizer.name != other.optimizer.name:
            return f"{self.optimizer.name} is {other.optimizer.name} there"
        mine, theirs = ([(t.name, t.rows, t.width) for t in spec.tables] for spec in (self, other))
        if mine != theirs:
            return f"tables {mine} are {theirs} there"
        if self.servers != other.servers:
            return f"{self.servers} servers are {other.servers} there"
        return None


def describe(
    named: Sequence[tuple[str, torch.Tensor, int | None]],
    optimizer: Optimizer,
    servers: int,
    tables: Sequence[TableSpec] = (),
) -> Spec:
    """Return the spec of a model's trained parameters."""
    tensors = []
    for name, tensor, group in named:
        if group is None:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelError("model", name, f"it is of type {dtype}; servers hold {', '.join(DTYPES)}")
        tensors.append(TensorSpec(name, tuple(tensor.shape), dtype, group))
    return Spec(tensors, describe_optimizer(optimizer), servers, tables=list(tables))


def describe_optimizer(optimizer: Optimizer) -> OptimizerSpec:
    name = type(optimizer).__name__
    if OPTIMIZERS.get(name) is not type(optimizer):
        raise ModelError("optimizer", name, f"servers know {', '.join(OPTIMIZERS)}; use one of them, or no servers")
    return OptimizerSpec(name, [plain_options(group) for group in optimizer.param_groups])


def plain_options(group: Mapping[str, Any]) -> dict[str, Option]:
    """A group's options as plain data: what an optimizer takes, without what only concerns speed.

    Schedulers keep notes of their own in a group (`max_momentum`, `swa_lr`), and so do users."""
    found: dict[str, Option] = {}
    for key, value in options_of(group).items():
        if key in ("foreach", "fused", "capturable", "differentiable") or key not in _arguments():
            continue
        if isinstance(value, torch.Tensor):
            value = float(value)
        if isinstance(value, (list, tuple)):
            value = [None if number is None else float(number) for number in value]
        if value is not None and not isinstance(value, (bool, int, float, str, list)):
            raise ModelError("optimizer", f"{key}={value!r}", "servers take numbers as options")
        found[key] = value
    return found


@cache
def _arguments() -> frozenset[str]:
    """What any of the optimizers may be told."""
    kinds: list[Any] = list(OPTIMIZERS.values())
    return frozenset(argument for kind in kinds for argument in kind([torch.zeros(1)]).defaults)


def make_optimizer(spec: OptimizerSpec) -> Optimizer:
    """Return the optimizer a spec names, with made-up parameters: its class and options are what matters."""
    kind: Any = OPTIMIZERS.get(spec.name)
    if kind is None:
        raise ModelError("optimizer", spec.name, f"this server knows {', '.join(OPTIMIZERS)}")
    known = set(kind([torch.zeros(1)]).defaults)
    groups = []
    for options in spec.groups:
        if unknown := sorted(set(options) - known):
            raise ModelError("optimizer", f"{spec.name}({unknown[0]}=…)", "it has no such option")
        groups.append({"params": [torch.zeros(1)], **restored_options(options)})
    try:
        optimizer: Optimizer = kind(groups)
    except (TypeError, ValueError) as error:
        raise ModelError("optimizer", spec.name, f"its options are refused: {error}") from error
    return optimizer


def restored_options(options: Mapping[str, Option]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


# ── who has what ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ShardPart:
    """Elements [start, stop) of a tensor, which are slot number `slot` of a server."""

    server: int
    slot: int
    start: int
    stop: int


class Shards:
    """A spec, worked out: every server's layout, and where the parts of each tensor are."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        kind = OPTIMIZERS.get(spec.optimizer.name)
        whole = kind is None or KNOWN[kind] is not Sees.ELEMENTS
        described = [
            (tensor.name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta"), tensor.group)
            for tensor in spec.tensors
        ]
        self._flat = FlatLayout.plan(described, owners=spec.servers, whole_tensors=whole)
        self.whole = whole
        self._placed = [[n for bucket in owned for n in bucket] for owned in assign(self._flat.chunks, spec.servers)]
        self.names = [slot.name for slot in self._flat.slots]
        self.parts: dict[str, list[ShardPart]] = {name: [] for name in self.names}
        self.layouts = [self._layout_of(server) for server in range(spec.servers)]

    def _layout_of(self, server: int) -> FlatLayout:
        """Return the layout of one server: its chunks one after another, its pieces as slots of their own."""
        slots: list[Slot] = []
        chunks: list[Chunk] = []
        offset = 0
        for number in self._placed[server]:
            chunk = self._flat.chunks[number]
            first = len(slots)
            for piece in chunk.pieces:
                of = self._flat.slots[piece.slot]
                shape = of.shape if self.whole else (piece.elements,)
                within = of.offset + piece.start * of.dtype.itemsize - chunk.start
                self.parts[of.name].append(ShardPart(server, len(slots), piece.start, piece.stop))
                slots.append(Slot(f"{of.name}[{piece.start}:{piece.stop}]", shape, of.dtype, of.group, offset + within))
            pieces = tuple(Piece(slot, 0, slots[slot].elements) for slot in range(first, len(slots)))
            chunks.append(Chunk(offset, offset + chunk.bytes, chunk.dtype, pieces))
            offset = aligned(offset + chunk.bytes)
        return FlatLayout(tuple(slots), tuple(chunks), offset, offset)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.spec.tensors}
