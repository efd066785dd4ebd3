"""What every operation of a model costs, and between which of them it must not be cut. Measured once, on an example.

It must not be cut

- between a value and an operation that changes it in place: the other stage would change a copy;
- between two operations that change the same buffer (a BatchNorm that is used twice): each stage has its own;
- inside `torch.no_grad`;
- where a value would cross that cannot travel.

All of that is found by running the operations and looking, not by their names. The model is left as it was: its
buffers and the random numbers are put back.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import ModelError
from paceline.exchange.packing import CannotTravel, pack
from paceline.split.cut import left_as_it_was
from paceline.split.trace import Traced
from paceline.torch_private import times_changed, tree_leaves, tree_map

REPETITIONS = 3
_COPIED_BYTES = 4 << 20
_clock = time.thread_time  # what others do on this core meanwhile does not count


@dataclass
class Measured:
    """What was found, by position of an operation in `Traced.nodes`."""

    seconds: list[float]  # of forward and backward
    bytes: list[int]  # of what it gives
    seconds_a_byte: float  # to hand something over
    forbidden: set[int] = field(default_factory=set)  # before which no stage may begin
    random: list[int] = field(default_factory=list)  # that draw random numbers
    changed: list[str] = field(default_factory=list)  # buffers that training changes


def run_node(model: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Runs one operation on the values of those before it, and returns its own."""
    args = fx.map_arg(node.args, values.__getitem__)
    kwargs = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(model)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def buffers_used(model: nn.Module, traced: Traced) -> list[set[str]]:
    """Returns by position the (first) names of the buffers that an operation has to do with."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}

    def of(node: fx.Node) -> Iterator[Any]:
        if node.op == "call_module":
            yield from model.get_submodule(str(node.target)).buffers()
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                yield operator.attrgetter(str(source.target))(model)

    return [{names[id(buffer)] for buffer in of(node) if id(buffer) in names} for node in traced.nodes]


def last_uses(traced: Traced) -> list[int]:
    """Returns by position that of the last operation that uses its value; one behind the last for what is returned."""
    position = {node: number for number, node in enumerate(traced.nodes)}
    return [max((position.get(user, len(position)) for user in node.users), default=0) for node in traced.nodes]


def measure(model: nn.Module, traced: Traced, tensors: Sequence[torch.Tensor], forward: Any) -> Measured:
    """Returns what the operations cost. `tensors` are those of the example, `forward()` is the model's own forward
    on them."""
    with left_as_it_was(model):
        found = _look(model, traced, tensors)
    with left_as_it_was(model), torch.no_grad():
        expected = forward()
    _compare(model, expected, found.pop("returned"))
    measured = Measured(seconds=[], seconds_a_byte=_copying(), **found)
    rounds = []
    for _ in range(REPETITIONS):
        with left_as_it_was(model):
            rounds.append(_time(model, traced, tensors))
    measured.seconds = [min(of_one) for of_one in zip(*rounds, strict=True)]
    return measured


def _look(model: nn.Module, traced: Traced, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Runs every operation once. Returns the fields of `Measured` that show then, and what the model returns."""
    nodes = traced.nodes
    position = {node: number for number, node in enumerate(nodes)}
    until = last_uses(traced)
    forbidden = {number for number, node in enumerate(nodes) if not node.meta.get("grad", True)}
    buffers = dict(model.named_buffers())
    versions = {name: times_changed(buffer) for name, buffer in buffers.items()}
    values: dict[fx.Node, Any] = {}
    sizes, random = [], []
    with torch.no_grad():
        for here, node in _operations(model, traced, tensors, values):
            before = {other: _versions(value) for other, value in values.items() if other.op != "get_attr"}
            state = torch.get_rng_state()
            value = run_node(model, node, values)
            if not torch.equal(state, torch.get_rng_state()):
                random.append(here)
            for other, version in before.items():
                if version != _versions(values[other]):  # changed in place: together with where it came from
                    forbidden.update(range(position.get(other, 0) + 1, here + 1))
            values[node] = value
            sizes.append(sum(leaf.nbytes for leaf in _tensors(value)))
            if not _travels(value):
                forbidden.update(range(here + 1, until[here] + 1))
    changed = [name for name, buffer in buffers.items() if times_changed(buffer) != versions[name]]
    used = buffers_used(model, traced)
    for name in changed:
        users = [number for number, names in enumerate(used) if name in names]
        if users:
            forbidden.update(range(users[0] + 1, users[-1] + 1))
    returned = fx.map_arg(traced.output, values.__getitem__)
    return {"bytes": sizes, "forbidden": forbidden, "random": random, "changed": changed, "returned": returned}


def _operations(
    model: nn.Module, traced: Traced, tensors: Sequence[torch.Tensor], values: dict[fx.Node, Any]
) -> Iterator[tuple[int, fx.Node]]:
    """Yields every operation with its position; `values` has what it needs then, and is to get what it gives."""
    until = last_uses(traced)
    position = {node: number for number, node in enumerate(traced.nodes)}
    # Copies: a forward may change its input, which the next run needs as it was.
    values |= {node: tensor.clone() for node, tensor in zip(traced.inputs, tensors, strict=True)}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = run_node(model, node, values)
        elif node in position:
            yield position[node], node
            for source in node.all_input_nodes:  # what nobody needs any more
                if source in position and until[position[source]] == position[node]:
                    del values[source]


def _versions(value: Any) -> list[int]:
    return [times_changed(leaf) for leaf in _tensors(value)]


def _travels(value: Any) -> bool:
    """Returns whether a value can go to another device."""
    try:
        pack(value)
    except CannotTravel:
        return False
    return True


def _compare(model: nn.Module, expected: Any, found: Any) -> None:
    """Refuses a model whose list of operations does not give what the model gives: torch.fx does not notice
    everything."""
    ones, others = _tensors(expected), _tensors(found)
    if len(ones) != len(others) or not all(map(_close, ones, others)):
        raise ModelError(
            "model",
            type(model).__name__,
            "followed operation by operation it gives another output than when it is called, so it cannot be cut by "
            "layer; its forward depends on something else than tensors and shapes",
        )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-3 * scale + 1e-12, equal_nan=True)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _copying() -> float:
    """Returns the seconds that a byte takes into shared memory and out of it, forward and backward."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = source.clone()
    began = _clock()
    target.copy_(source)
    return 2 * (_clock() - began) / _COPIED_BYTES


def _time(model: nn.Module, traced: Traced, tensors: Sequence[torch.Tensor]) -> list[float]:
    """Returns the seconds of every operation, forward and backward, each by itself."""
    values: dict[fx.Node, Any] = {}
    seconds: list[float] = []
    with torch.enable_grad():
        for _, node in _operations(model, traced, tensors, values):
            value, lasted = _one(model, node, values)
            values[node] = tree_map(_apart, value)
            seconds.append(lasted)
    return seconds


def _one(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, float]:
    """Runs one operation forward and backward. Returns its value, and the seconds."""
    began = _clock()
    try:
        value = run_node(model, node, values)
    except RuntimeError:  # it changes an input in place, which autograd allows of no beginning of a graph
        with torch.no_grad():
            began = _clock()
            return run_node(model, node, values), 3 * (_clock() - began)
    ends = [leaf for leaf in _tensors(value) if leaf.requires_grad and leaf.grad_fn is not None]
    begins = _begins(model, node, values)
    if ends and begins:
        torch.autograd.grad(ends, begins, [torch.ones_like(end) for end in ends], allow_unused=True)
    return value, _clock() - began


def _begins(model: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    """Returns the tensors at which an operation's backward ends: its inputs and parameters."""
    found = [leaf for source in node.all_input_nodes for leaf in _tensors(values[source])]
    if node.op == "call_module":
        found += model.get_submodule(str(node.target)).parameters()
    return [tensor for tensor in found if tensor.requires_grad]


def _apart(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
