"""What a run knows, as one value: for checkpoints, for replicas that join, for servers.

Tensors are kept beside it, whole and under the model's own names, so a run saved under one strategy goes on under any
other.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import Checkpoint
from paceline.data.ledger import Count, Ledger, LedgerState
from paceline.data.script_call import ScriptCall
from paceline.errors import CheckpointError, InvalidInput, PacelineError
from paceline.evaluations import EvaluationResult
from paceline.torch_private import mark_stepped

StateByName = dict[str, dict[str, Any]]  # an optimizer's, by parameter name
RANDOM_STATE = "random/torch"
HOSTS = "hosts/"  # the names of what several hosts keep in order to exchange begin so


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is not a tensor."""

    step: Count  # updates so far
    steps_before: Count = 0  # of those, before the chapter in progress
    chapter: Count = 0
    ledger: LedgerState | None = None  # of the chapter in progress
    results: list[EvaluationResult] = []
    logs: Count = 0  # calls of `trainer.log` where the run stands, between two loops
    options: list[dict[str, Any]] = []  # of the optimizer's groups
    schedule: dict[str, Any] | None = None
    numbers: dict[str, dict[str, Any]] = {}  # what an optimizer keeps besides tensors, by parameter
    random: tuple[int, list[int], float | None] | None = None  # of Python's `random`
    replicas: int = 1
    accumulate: int = 1
    open_samples: Count = 0  # of a step that was being made when this was taken, for a replica that joins
    call: ScriptCall | None = None  # of `batches`, in which that was

    def with_open_step(self) -> RunState:
        """Returns the state after the step that was open when it was taken."""
        assert self.ledger is not None
        ledger = Ledger.like(self.ledger)
        ledger.load(self.ledger)
        ledger.commit_samples(self.open_samples)
        return msgspec.structs.replace(self, step=self.step + 1, ledger=ledger.record(), open_samples=0)


def read_state(saved: Checkpoint) -> RunState:
    """Returns the state in a checkpoint, if it is one: all of it that can be, is looked at before any of it is used."""
    with named(saved.path):
        state = msgspec.convert(saved.notes, RunState)
        if state.ledger is not None:
            Ledger.like(state.ledger).load(state.ledger)
            if state.step != state.steps_before + state.ledger.step:
                told = f"{state.steps_before} before the chapter in progress and {state.ledger.step} in it"
                raise CheckpointError(f"it has made {state.step} updates, and {told}")
        if state.random is not None:
            random.Random().setstate(_random_state(state.random))
    return state


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Has whatever goes wrong with a checkpoint's contents say which file that is."""
    try:
        yield
    except (CheckpointError, InvalidInput, *_UNFIT) as error:
        told = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        if str(path) in told:
            raise
        sentence = " ".join(told.split())
        raise CheckpointError(f"{path} cannot be resumed from: {sentence}") from error


_UNFIT = (msgspec.ValidationError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _alike(saved: Any, own: Any) -> bool:
    """Returns whether a saved value is of the kind of the one it is to replace: so far as this run has one."""
    if own is None or (isinstance(own, (int, float)) and isinstance(saved, (int, float))):
        return own is None or isinstance(own, bool) == isinstance(saved, bool)
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(_alike(saved[key], own[key]) for key in own.keys() & saved.keys())
    if isinstance(own, (list, tuple)):
        return isinstance(saved, (list, tuple)) and len(saved) >= len(own) and all(map(_alike, saved, own))
    return type(saved) is type(own)


# ── the optimizer's state ────────────────────────────────────────────────────────────────────────────────────


def flatten(states: StateByName) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Returns optimizer state as tensors under flat keys, and its plain numbers by parameter."""
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


def of_hosts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what several hosts have kept in order to exchange."""
    return {name.removeprefix(HOSTS): value for name, value in tensors.items() if name.startswith(HOSTS)}


# ── random numbers ───────────────────────────────────────────────────────────────────────────────────────────


def random_numbers() -> tuple[int, list[int], float | None]:
    """Returns the state of Python's `random`."""
    version, numbers, gauss = random.getstate()
    return version, list(numbers), gauss


def restore_random(state: RunState, tensors: dict[str, torch.Tensor]) -> None:
    """Goes on with the random numbers of a save, of torch and of Python's `random`."""
    if RANDOM_STATE in tensors:
        torch.set_rng_state(tensors[RANDOM_STATE].clone())
    if state.random is not None:
        random.setstate(_random_state(state.random))


def _random_state(saved: tuple[int, list[int], float | None]) -> tuple[int, tuple[int, ...], float | None]:
    version, numbers, gauss = saved
    return version, tuple(numbers), gauss


# ── options and schedule ─────────────────────────────────────────────────────────────────────────────────────


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns learning rates and other options of every group, as plain data."""
    return [
        {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    ]


def restore_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Takes over the options of a save, but for those that only concern speed."""
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(options)} optimizer groups and this optimizer {len(optimizer.param_groups)}: "
            "resume with the same groups"
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            if key in ("foreach", "fused", "params"):
                continue
            own = group.get(key, 0.0 if key == "initial_lr" else None)
            if not _alike(value, float(own) if isinstance(own, torch.Tensor) else own):
                raise CheckpointError(
                    f"the checkpoint has {value!r} as the optimizer's {key}, and this one has {own!r}"
                )
            if isinstance(own, torch.Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


class Schedule:
    """A scheduler that is told of every update of the run, whoever has made it."""

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._told = 0  # updates

    def catch_up(self, steps: int) -> None:
        """Steps the scheduler as often as the run has made a step."""
        # A scheduler warns unless it has seen its optimizer step; here the owners' optimizers have.
        mark_stepped(self._optimizer)
        while self._told < steps:
            if self._scheduler is not None:
                self._scheduler.step()
            self._told += 1

    def state(self) -> dict[str, Any] | None:
        """Returns the scheduler's state, if there is one, as plain data."""
        if self._scheduler is None:
            return None
        state: dict[str, Any] = _plain(self._scheduler.state_dict())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the state of {type(self._scheduler).__name__} cannot be saved as plain data ({error}): "
                "step that scheduler yourself instead of giving it to Trainer"
            ) from error
        return state

    def load(self, state: dict[str, Any] | None, steps: int) -> None:
        """Goes on after so many updates."""
        if self._scheduler is not None and state is not None:
            saved, own = _from_plain(state), self._scheduler.state_dict()
            unlike = sorted(key for key in saved.keys() & own.keys() if not _alike(saved[key], own[key]))
            if unlike:
                raise CheckpointError(f"the checkpoint has {saved[unlike[0]]!r} as the scheduler's {unlike[0]}")
            self._scheduler.load_state_dict(saved)
        self._told = steps


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
