"""What an optimizer keeps, and where that lies.

torch's optimizers are almost all elementwise: what they do to an element depends on that element alone, and on
scalars such as the step count. So the user's class, with the user's options, can be given flat runs of elements
as its "parameters", one chunk at a time, by whoever owns the chunk. What it keeps lies in the chunk's state block:

    born (a byte a piece) │ piece 0: step, exp_avg, exp_avg_sq │ piece 1: …

which is all a survivor needs to go on in the place of an owner that died. Which entries there are is found by
letting the optimizer update a few made-up elements once.

Optimizers that need whole tensors (Adafactor, Muon, anything we do not know) get pieces that are whole tensors of
the true shape. Those that look across tensors, or need a closure (LBFGS), are refused.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.layout import FlatLayout, Piece, Slot, aligned
from paceline.torch_private import STEP_HOOKS

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
# These have a kernel that reads and writes every element once; the results agree to rounding.
FUSED: frozenset[type[Optimizer]] = frozenset(
    {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
)
REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it needs the whole model and a closure; use one that updates each parameter by itself",
    torch.optim.SparseAdam: "it takes sparse gradients only and mirrored replicas sum dense ones; use Adam",
}
PythonNumber = int | float | bool


@dataclass(frozen=True)
class Entry:
    """One state value of one piece: where in the chunk's block, of what type and shape."""

    key: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    elementwise: bool  # one value an element of the piece
    python: type[PythonNumber] | None  # the optimizer keeps it as a plain number, not as a tensor

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The value, as it lies in the chunk's block."""
        size = self.dtype.itemsize * math.prod(self.shape)
        return block[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def needs_whole_tensors(optimizer: Optimizer) -> bool:
    """Whether this optimizer's tensors must not be cut; refuses those that cannot be distributed at all."""
    kind = type(optimizer)
    for refused, why in REFUSED.items():
        if issubclass(kind, refused):
            raise ModelError("optimizer", kind.__name__, why)
    if any(getattr(optimizer, hooks, None) for hooks in STEP_HOOKS):
        raise ModelError(
            "optimizer", kind.__name__, "step hooks are not called by owners; do that work after trainer.step"
        )
    return kind not in ELEMENTWISE


class StateLayout:
    """Where the optimizer's state lies: for every chunk the entries of every piece."""

    def __init__(self, optimizer: Optimizer, layout: FlatLayout, states: Mapping[int, Mapping[str, Any]]) -> None:
        """`states`: what the user's optimizer already holds, by slot (Adagrad has some from the start)."""
        whole = needs_whole_tensors(optimizer)
        self.entries: list[list[list[Entry]]] = []
        self.block_bytes: list[int] = []
        found: dict[Any, dict[str, Any]] = {}
        for chunk in layout.chunks:
            offset = aligned(len(chunk.pieces))
            of_chunk: list[list[Entry]] = []
            for piece in chunk.pieces:
                slot = layout.slots[piece.slot]
                assert slot.group is not None
                alike = (slot.group, slot.dtype, slot.shape if whole else None)
                if alike not in found:
                    found[alike] = (
                        _probe_whole(optimizer, slot, states.get(piece.slot, {}))
                        if whole
                        else _probe_elements(optimizer, slot)
                    )
                of_piece = []
                for key, value in found[alike].items():
                    entry = _entry(type(optimizer), key, value, offset, piece, whole)
                    of_piece.append(entry)
                    size = entry.dtype.itemsize * math.prod(entry.shape)
                    offset = aligned(offset + size)
                of_chunk.append(of_piece)
            self.entries.append(of_chunk)
            self.block_bytes.append(offset)


_PROBED = (4,)  # shape of the made-up parameter


def _probe_elements(optimizer: Optimizer, slot: Slot) -> dict[str, Any]:
    """What an elementwise optimizer keeps for one parameter, found by one update of a made-up one."""
    assert slot.group is not None
    parameter = torch.zeros(_PROBED, dtype=slot.dtype)
    options = {**options_of(optimizer.param_groups[slot.group]), "params": [parameter]}
    probe: Any = type(optimizer)
    return _after_one_update(probe([options]), parameter)


def _probe_whole(optimizer: Optimizer, slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same for one that must see whole tensors: its class is not known, so it is copied rather than made."""
    assert slot.group is not None
    parameter = torch.zeros(slot.shape, dtype=slot.dtype)
    probe = bare_copy(optimizer)
    probe.state[parameter].update(copy.deepcopy(dict(state)))
    probe.param_groups = [{**options_of(optimizer.param_groups[slot.group]), "params": [parameter]}]
    return _after_one_update(probe, parameter)


def _after_one_update(probe: Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    parameter.grad = torch.zeros_like(parameter)
    probe.step()
    return {key: value for key, value in probe.state[parameter].items() if value is not None}


def _entry(kind: type, key: str, value: Any, offset: int, piece: Piece, whole: bool) -> Entry:
    if isinstance(value, torch.Tensor):
        elementwise = not whole and tuple(value.shape) == _PROBED
        shape = (piece.elements,) if elementwise else tuple(value.shape)
        return Entry(key, offset, value.dtype, shape, elementwise, None)
    if isinstance(value, (bool, int, float)):
        return Entry(key, offset, torch.float64, (), False, type(value))
    raise ModelError(
        "optimizer",
        kind.__name__,
        f"it keeps {key!r} as {type(value).__name__}; only tensors and numbers can be shared",
    )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, with no parameters and no state."""
    bare = copy.copy(optimizer)
    bare.__dict__.pop("step", None)  # a scheduler replaces it by a wrapper bound to the original
    bare.__dict__["state"] = defaultdict(dict)
    bare.__dict__.update({hooks: OrderedDict() for hooks in STEP_HOOKS})
    bare.param_groups = []
    return bare
