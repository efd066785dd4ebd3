"""A training run as whole tensors and plain notes: what a checkpoint holds, in any strategy's terms.

Keys are the model's own names, so a run saved under one strategy goes on under any other.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import Checkpoint
from paceline.errors import CheckpointError
from paceline.loop.engine import StateByName
from paceline.optim.models import own_state

RANDOM_STATE = "random/torch"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own state_dict."""
    return {key: value.detach() for key, value in own_state(model).state_dict().items()}


def flatten(states: StateByName) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Optimizer state as tensors under flat keys, and its plain numbers by parameter."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def unflatten(tensors: dict[str, torch.Tensor], numbers: dict[str, dict[str, Any]]) -> StateByName:
    states: StateByName = {name: dict(values) for name, values in numbers.items()}
    for flat, value in tensors.items():
        if flat.startswith("optimizer/"):
            name, key = flat.removeprefix("optimizer/").rsplit("/", 1)
            states.setdefault(name, {})[key] = value
    return states


def random_tensors() -> dict[str, torch.Tensor]:
    return {RANDOM_STATE: torch.get_rng_state()}


def random_notes() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]


def restore_random(checkpoint: Checkpoint) -> None:
    """Go on with the random numbers of the save (of torch and of Python's `random`)."""
    if RANDOM_STATE in checkpoint.training:
        torch.set_rng_state(checkpoint.training[RANDOM_STATE].clone())
    if state := checkpoint.notes.get("random"):
        random.setstate((state[0], tuple(state[1]), state[2]))


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rates and other options of every group, as plain data."""
    return [
        {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    ]


def restore_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Take over the options of a save, but for those that only concern speed."""
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(options)} optimizer groups and this optimizer {len(optimizer.param_groups)}: "
            "resume with the same groups"
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            if key in ("foreach", "fused", "params"):
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def schedule_and_options(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """What a script's optimizer and scheduler were told, as plain data."""
    return {"options": group_options(optimizer), "scheduler": schedule_notes(scheduler)}


def schedule_notes(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The scheduler's state, if there is one, as plain data."""
    if scheduler is None:
        return None
    state: dict[str, Any] = _plain(scheduler.state_dict())
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of {type(scheduler).__name__} cannot be saved as plain data ({error}): "
            "step that scheduler yourself instead of giving it to Trainer"
        ) from error
    return state


def restore_schedule(scheduler: LRScheduler | None, notes: dict[str, Any] | None) -> None:
    if scheduler is not None and notes is not None:
        scheduler.load_state_dict(_from_plain(notes))


def _plain(value: Any) -> Any:
    """JSON has only text as keys; a table with other keys (MultiStepLR counts its milestones) is kept as pairs."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(entry) for key, entry in value.items()}
        pairs = [[key, _plain(entry)] for key, entry in value.items()]
        return {"pairs": pairs, "counter": isinstance(value, Counter)}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"pairs", "counter"}:
            table = {key: _from_plain(entry) for key, entry in value["pairs"]}
            return Counter(table) if value["counter"] else table
        return {key: _from_plain(entry) for key, entry in value.items()}
    return [_from_plain(entry) for entry in value] if isinstance(value, list) else value
