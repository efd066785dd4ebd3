"""What every operator of a graph costs, and between which of them it must not be cut. Measured once, on an example.

It must not be cut

- between a value and an operator that changes it in place: the other stage would change a copy;
- between two operators that change the same buffer (a BatchNorm that is used twice): each stage has its own;
- where a value would cross that cannot travel.

The model is left as it was: its buffers and the random numbers are put back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import fx, nn

from paceline.exchange.packing import CannotTravel, pack
from paceline.graph.call_graph import AROUND, CallGraph
from paceline.graph.kept import KeptGraph
from paceline.graph.operators import changed_by, changed_groups
from paceline.optim.models import left_as_it_was
from paceline.torch_private import tree_leaves, tree_map

REPETITIONS = 3
LONG = 1.0  # seconds: what takes that long is measured well enough at once
_NOTE = "operators"
_UNDISTURBED = 0.8  # of the time that measuring takes is this thread's own
_COPIED_BYTES = 4 << 20
_clock = time.thread_time  # what others do on this core meanwhile does not count


@dataclass
class Measured:
    """What was found, by position of an operator in `CallGraph.nodes`."""

    seconds: list[float]  # of forward and backward
    bytes: list[int]  # of what it gives
    seconds_a_byte: float  # to hand something over
    forbidden: set[int] = field(default_factory=set)  # before which no stage may begin
    random: list[int] = field(default_factory=list)  # that draw random numbers
    changed: list[str] = field(default_factory=list)  # buffers that training changes


def buffers_used(call: CallGraph, buffers: Sequence[str]) -> list[set[str]]:
    """Returns by position the names of the buffers that an operator has to do with."""
    names = {node: name for node, name in call.names.items() if name in buffers}
    return [{names[source] for source in node.all_input_nodes if source in names} for node in call.nodes]


def last_uses(call: CallGraph) -> list[int]:
    """Returns by position that of the last operator that uses its value; one behind the last for what is returned."""
    position = {node: number for number, node in enumerate(call.nodes)}
    return [max((position.get(user, len(position)) for user in node.users), default=0) for node in call.nodes]


def measured_before(kept: KeptGraph) -> Measured | None:
    """Returns what an earlier run has measured of the same graph."""
    note = kept.note(_NOTE)
    with suppress(msgspec.MsgspecError):
        if note is not None:
            found = msgspec.msgpack.decode(note, type=Measured)
            return found if len(found.seconds) == len(found.bytes) == len(kept.graph.nodes) else None
    return None


def measure(model: nn.Module, kept: KeptGraph, inputs: Sequence[torch.Tensor]) -> Measured:
    """Returns what the operators cost, on these inputs, and keeps it with the graph; but not what was measured while
    others had this core: the next run measures again."""
    call, began = kept.graph, (time.perf_counter(), _clock())
    with left_as_it_was(model):
        found = _look(model, call, inputs)
    measured = Measured(seconds=[], seconds_a_byte=_copying(), **found)
    rounds: list[list[float]] = []
    while len(rounds) < REPETITIONS and sum(map(sum, rounds)) < LONG:
        with left_as_it_was(model):
            rounds.append(_time(model, call, inputs))
    measured.seconds = [min(of_one) for of_one in zip(*rounds, strict=True)]
    if _clock() - began[1] > _UNDISTURBED * (time.perf_counter() - began[0]):
        kept.add_note(_NOTE, msgspec.msgpack.encode(measured))
    return measured


def _look(model: nn.Module, call: CallGraph, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Runs every operator once. Returns the fields of `Measured` that show then."""
    nodes = call.nodes
    position = {node: number for number, node in enumerate(nodes)}
    until = last_uses(call)
    forbidden = _torn_apart(call, position)
    values: dict[fx.Node, Any] = {}
    sizes, random = [], []
    with torch.no_grad():
        for here, node in _operators(model, call, inputs, values):
            state = torch.get_rng_state()
            values[node] = value = _run(node, values)
            if not torch.equal(state, torch.get_rng_state()):
                random.append(here)
            sizes.append(sum(leaf.nbytes for leaf in _tensors(value)))
            if not _travels(value):
                forbidden.update(range(here + 1, until[here] + 1))
    buffers = [name for name, _ in model.named_buffers()]
    changed_nodes = {call.names.get(operand) for node in nodes for operand in changed_by(node)}
    changed = [name for name in buffers if name in changed_nodes]
    for name in changed:
        users = [number for number, names in enumerate(buffers_used(call, buffers)) if name in names]
        forbidden.update(range(users[0] + 1, users[-1] + 1))
    return {"bytes": sizes, "forbidden": forbidden, "random": random, "changed": changed}


def _torn_apart(call: CallGraph, position: Mapping[fx.Node, int]) -> set[int]:
    """Returns the places between a value and what changes it in place."""
    found: set[int] = set()
    first_in_memory = changed_groups(call.nodes)
    for node in call.nodes:
        for operand in changed_by(node):
            first = first_in_memory.get(operand, operand)
            began = position[first] if first in position else min(position[u] for u in first.users if u in position)
            found.update(range(began + 1, position[node] + 1))
    return found


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Runs one operator on the values of those before it, and returns its own."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    grad, autocast = node.meta.get("mode", AROUND)
    with torch.set_grad_enabled(torch.is_grad_enabled() if grad is None else grad):
        if autocast is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        device, kind, on = autocast
        with torch.autocast(device, kind, on, cache_enabled=False):
            return node.target(*args, **kwargs)  # type: ignore[operator]


def _operators(
    model: nn.Module, call: CallGraph, inputs: Sequence[torch.Tensor], values: dict[fx.Node, Any]
) -> Iterator[tuple[int, fx.Node]]:
    """Yields every operator with its position; `values` has what it needs then, and is to get what it gives."""
    until = last_uses(call)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    # Copies: a computation may change its input, which the next run needs as it was.
    values |= {node: tensor.clone() for node, tensor in zip(call.inputs, inputs, strict=True)}
    values |= {node: named[name] for name, node in call.tensors.items()}
    values |= call.constants
    position = {node: number for number, node in enumerate(call.nodes)}
    for here, node in enumerate(call.nodes):
        yield here, node
        for source in node.all_input_nodes:  # what nobody needs any more
            if source in position and until[position[source]] == here:
                del values[source]


def _travels(value: Any) -> bool:
    """Returns whether a value can go to another device."""
    try:
        pack(value)
    except CannotTravel:
        return False
    return True


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _copying() -> float:
    """Returns the seconds that a byte takes into shared memory and out of it, forward and backward."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = source.clone()
    began = _clock()
    target.copy_(source)
    return 2 * (_clock() - began) / _COPIED_BYTES


def _time(model: nn.Module, call: CallGraph, inputs: Sequence[torch.Tensor]) -> list[float]:
    """Returns the seconds of every operator, forward and backward, each by itself."""
    values: dict[fx.Node, Any] = {}
    seconds: list[float] = []
    with torch.enable_grad():
        for _, node in _operators(model, call, inputs, values):
            value, lasted = _one(node, values)
            values[node] = tree_map(_apart, value)
            seconds.append(lasted)
    return seconds


def _one(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, float]:
    """Runs one operator forward and backward. Returns its value, and the seconds."""
    began = _clock()
    try:
        value = _run(node, values)
    except RuntimeError:  # it changes an input in place, which autograd allows of no beginning of a graph
        with torch.no_grad():
            began = _clock()
            return _run(node, values), 3 * (_clock() - began)
    ends = [leaf for leaf in _tensors(value) if leaf.requires_grad and leaf.grad_fn is not None]
    sources = (leaf for source in node.all_input_nodes for leaf in _tensors(values[source]))
    begins = [tensor for tensor in sources if tensor.requires_grad]
    if ends and begins:
        torch.autograd.grad(ends, begins, [torch.ones_like(end) for end in ends], allow_unused=True)
    return value, _clock() - began


def _apart(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
