"""How long the user's optimizer takes for the whole model on one core, as owners run it: chunk by chunk, in the
cache.

It updates copies of parameters, with made-up gradients; the user's are not touched. Of a large model some megabytes
stand for all.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.optim.shard_optimizer import FUSED
from paceline.optim.trial import KNOWN, bare_copy, options_of
from paceline.profile.step_times import repeat
from paceline.profile.values import Timing

CHUNK_BYTES = 2 << 20
MOST_BYTES = 96 << 20
_LONG_S = 0.3


def update_time(optimizer: Optimizer, budget_s: float) -> tuple[Timing, int]:
    """Returns the time of one update of everything that the optimizer holds, and the bytes of its state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    total = sum(parameter.nbytes for parameter in parameters)
    chunks, taken = _chunks(optimizer)
    own = bare_copy(optimizer)

    def update() -> None:
        for groups in chunks:
            own.param_groups = groups
            own.step()

    update()
    update()
    lasted, _ = repeat(update, time.monotonic() + budget_s, long_s=_LONG_S)
    state = sum(
        value.nbytes for held in own.state.values() for value in held.values() if isinstance(value, torch.Tensor)
    )
    scale = total / max(1, taken)
    return lasted.times(scale), int(state * scale)


def reference_update_time(optimizer: Optimizer, budget_s: float) -> Timing:
    """Returns the same for SGD with momentum on the same parameters: what machines are calibrated with."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return update_time(torch.optim.SGD(parameters, lr=1e-9, momentum=0.9), budget_s)[0]


def _chunks(optimizer: Optimizer) -> tuple[list[list[dict[str, Any]]], int]:
    """Returns copies of the parameters in chunks, each the groups of one update; and how many bytes were copied."""
    whole = type(optimizer) not in KNOWN or KNOWN[type(optimizer)].value != "elements"
    chunks: list[list[dict[str, Any]]] = [[]]
    filled = taken = 0
    for group in optimizer.param_groups:
        options = copy.deepcopy(options_of(group))
        options["lr"] = 1e-9 if "lr" in options else options.get("lr")
        if type(optimizer) in FUSED and not options.get("foreach") and not options.get("differentiable"):
            options["fused"] = True
        for parameter in group["params"]:
            if not parameter.requires_grad or taken >= MOST_BYTES:
                continue
            made = parameter.detach().clone()
            pieces = [made] if whole else list(made.view(-1).split(max(1, CHUNK_BYTES // made.element_size())))
            for piece in pieces:
                piece.requires_grad_(True)
                piece.grad = torch.full_like(piece, 1e-3)
                if filled + piece.nbytes > CHUNK_BYTES and chunks[-1]:
                    chunks.append([])
                    filled = 0
                same = next((known for known in chunks[-1] if known["of"] is group), None)
                if same is None:
                    chunks[-1].append({**options, "params": [piece], "of": group})
                else:
                    same["params"].append(piece)
                filled += piece.nbytes
                taken += piece.nbytes
    for groups in chunks:
        for made_group in groups:
            del made_group["of"]
    return [groups for groups in chunks if groups], taken
