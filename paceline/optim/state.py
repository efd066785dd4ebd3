"""What an optimizer keeps, and where that lies.

torch's optimizers are almost all elementwise: what they do to an element depends on that element alone, and on
scalars such as the step count. So the user's class, with the user's options, can be given flat runs of elements
as its "parameters", one chunk at a time, by whoever owns the chunk. What it keeps lies in the chunk's state block:

    born (a byte a piece) │ kept (a byte an entry) │ piece 0: step, exp_avg, exp_avg_sq │ piece 1: … │ group 0: …

which is all a survivor needs to go on in the place of an owner that died. Which entries there are is found by
letting the optimizer update a few made-up elements (`trial.py`). An entry is kept from the update on that makes it.

Optimizers that need whole tensors (Adafactor, Muon, anything we do not know) get pieces that are whole tensors of
the true shape; those that look across tensors get all of them, in one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.layout import Chunk, FlatLayout, Piece, Slot, aligned
from paceline.optim.trial import UPDATES, MadeUp, Sees, Traits, Trial, options_of, traits_of

PythonNumber = int | float | bool


@dataclass(frozen=True)
class Entry:
    """One state value of one piece, or of a group: where in the chunk's block, of what type and shape."""

    key: str
    mark: int  # the byte that says whether it is kept yet
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    elementwise: bool  # one value an element of the piece
    python: type[PythonNumber] | None  # the optimizer keeps it as a plain number, not as a tensor

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The value, as it lies in the chunk's block."""
        return block[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, block: torch.Tensor) -> Any:
        """The value as the optimizer has it: a view of the block, or a plain number."""
        value = self.view(block)
        return value if self.python is None else self.python(value.item())

    def write(self, block: torch.Tensor, value: Any) -> None:
        """Keep this value from now on."""
        view = self.view(block)
        view.copy_(value.detach().reshape(view.shape)) if isinstance(value, torch.Tensor) else view.fill_(value)
        block[self.mark] = 1


def layout_for(
    optimizer: Optimizer,
    named: Sequence[tuple[str, torch.Tensor, int | None]],
    owners: int,
    *,
    whole_tensors: bool = False,
) -> FlatLayout:
    """Where the parameters lie, and how they are cut, so that this optimizer sees what it has to see."""
    sees = traits_of(optimizer).sees
    layout = FlatLayout.plan(
        named,
        owners=owners,
        whole_tensors=whole_tensors or sees is not Sees.ELEMENTS,
        one_chunk=sees is Sees.MODEL,
    )
    if sees is Sees.MODEL and len(layout.chunks) > 1:
        types = sorted({str(chunk.dtype).removeprefix("torch.") for chunk in layout.chunks})
        raise ModelError(
            "optimizer",
            type(optimizer).__name__,
            f"it looks at all tensors at once, and these are of types {', '.join(types)}; make them of one type",
        )
    return layout


class StateLayout:
    """Where the optimizer's state lies: for every chunk the entries of every piece, and of every group."""

    def __init__(self, optimizer: Optimizer, layout: FlatLayout, states: Mapping[int, Mapping[str, Any]]) -> None:
        """`states`: what the user's optimizer already holds, by slot (Adagrad has some from the start)."""
        self.traits = traits_of(optimizer)
        self.entries: list[list[list[Entry]]] = []
        self.group_entries: list[dict[int, list[Entry]]] = []
        self.block_bytes: list[int] = []
        self._kind = type(optimizer)
        whole = self.traits.sees is not Sees.ELEMENTS
        found: dict[Any, dict[str, Any]] = {}
        for chunk in layout.chunks:
            kept: list[dict[str, Any]] = []
            for piece in chunk.pieces:
                slot = layout.slots[piece.slot]
                alike = (slot.group, slot.dtype, slot.shape if whole else None)
                if alike not in found:
                    found[alike] = _kept_of(optimizer, slot, self.traits, states.get(piece.slot, {}))
                kept.append(found[alike])
            self._place(chunk, kept, sorted({layout.slots[piece.slot].group or 0 for piece in chunk.pieces}))

    def _place(self, chunk: Chunk, kept: Sequence[Mapping[str, Any]], groups: Sequence[int]) -> None:
        """Find a place for every value of a chunk: of its pieces, and of the groups that they are in."""
        in_groups = self.traits.in_groups
        mark = len(chunk.pieces)
        offset = aligned(mark + sum(map(len, kept)) + len(groups) * len(in_groups))

        def placed(values: Mapping[str, Any], piece: Piece | None) -> list[Entry]:
            nonlocal mark, offset
            entries = []
            for key, value in values.items():
                entries.append(self._entry(key, value, mark, offset, piece))
                mark += 1
                offset = aligned(offset + entries[-1].bytes)
            return entries

        self.entries.append([placed(values, piece) for values, piece in zip(kept, chunk.pieces, strict=True)])
        self.group_entries.append({group: placed(in_groups, None) for group in groups})
        self.block_bytes.append(offset)

    def _entry(self, key: str, value: Any, mark: int, offset: int, piece: Piece | None) -> Entry:
        if isinstance(value, torch.Tensor):
            elementwise = self.traits.sees is Sees.ELEMENTS and piece is not None and tuple(value.shape) == _PROBED
            shape = (piece.elements,) if elementwise and piece is not None else tuple(value.shape)
            return Entry(key, mark, offset, value.dtype, shape, elementwise, None)
        if isinstance(value, (bool, int, float)):
            return Entry(key, mark, offset, torch.float64, (), False, type(value))
        raise ModelError(
            "optimizer",
            self._kind.__name__,
            f"it keeps {key!r} as {type(value).__name__}; only tensors and numbers can be shared",
        )


_PROBED = (4,)  # shape of a made-up run of elements


def _kept_of(optimizer: Optimizer, slot: Slot, traits: Traits, state: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer keeps of a parameter like this one; found by a few updates of a made-up one."""
    assert slot.group is not None
    if traits.sees is Sees.ELEMENTS:
        parameter = torch.zeros(_PROBED, dtype=slot.dtype)
        parameter.grad = torch.zeros_like(parameter)
        kind: Any = type(optimizer)  # is made anew: some have state from the start
        made = kind([{**options_of(optimizer.param_groups[slot.group]), "params": [parameter]}])
        made.step()
        return {key: value for key, value in made.state[parameter].items() if value is not None}
    trial = Trial(optimizer, [MadeUp(slot.group, slot.shape, slot.dtype, state=state)])
    for number in range(UPDATES):
        trial.update(number)
        found = trial.state(trial.parameters[0])
        if traits.in_states <= found.keys():
            break
    return found
