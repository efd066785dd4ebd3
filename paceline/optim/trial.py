"""What an optimizer looks at when it updates an element, and what it keeps: found by trying it.

    elements   nothing but that element, and numbers such as the step count: tensors may be cut anywhere
    tensors    the tensor that it is in (Adafactor, Muon, LARS): tensors stay whole
    model      other tensors too (a norm over all gradients: LAMB; an estimate for all: Prodigy): one owner has all

torch's own are known by name. Any other class is tried on a few made-up tensors, with the user's shapes and options,
from their first update on: together, and each by itself. What that cannot answer is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.torch_private import STEP_HOOKS


class Sees(Enum):
    """What one update has to look at."""

    ELEMENTS = "elements"
    TENSORS = "tensors"
    MODEL = "model"


_BY_ELEMENT = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop"
KNOWN: Mapping[type[Optimizer], Sees] = {
    **{getattr(torch.optim, name): Sees.ELEMENTS for name in _BY_ELEMENT.split()},
    torch.optim.Adafactor: Sees.TENSORS,
    torch.optim.Muon: Sees.TENSORS,
}
REFUSED: Mapping[type[Optimizer], str] = {
    torch.optim.LBFGS: "it needs the whole model and a closure; use one that updates each parameter by itself",
    torch.optim.SparseAdam: "it takes sparse gradients only and mirrored replicas sum dense ones; use Adam",
}
UPDATES = 8  # in a trial: what begins with an optimizer's first few steps is seen
_SCALES = (1.0, 30.0, 0.01)  # of made-up gradients: some are clipped, if any are


@dataclass(frozen=True)
class Traits:
    """What is known of an optimizer."""

    sees: Sees
    in_groups: Mapping[str, Any] = field(default_factory=dict)  # what it counts in its groups: names, and values
    in_states: frozenset[str] = frozenset()  # what it keeps of a parameter, as far as a trial has shown


def traits_of(optimizer: Optimizer) -> Traits:
    """What this optimizer looks at and keeps; those that owners cannot run are refused."""
    kind = type(optimizer)
    for refused, why in REFUSED.items():
        if issubclass(kind, refused):
            raise ModelError("optimizer", kind.__name__, why)
    if any(getattr(optimizer, hooks, None) for hooks in STEP_HOOKS):
        raise ModelError(
            "optimizer", kind.__name__, "step hooks are not called by owners; do that work after trainer.step"
        )
    if kind in KNOWN:
        return Traits(KNOWN[kind])
    _refuse_wrapper(optimizer)
    chosen = _chosen(optimizer)
    together = Trial(optimizer, chosen)
    apart = [Trial(optimizer, [one]) for one in chosen]
    options = [options_of(group) for group in together.optimizer.param_groups]
    differs = False
    for number in range(UPDATES):
        for trial in (together, *apart):
            trial.update(number)
        alone = [parameter for trial in apart for parameter in trial.parameters]
        differs |= not all(map(_close, together.parameters, alone))
    in_groups = {
        key: value
        for group, before in zip(together.optimizer.param_groups, options, strict=True)
        for key, value in options_of(group).items()
        if key not in before or not _same(value, before[key])
    }
    in_states = {key for parameter in together.parameters for key in together.state(parameter)}
    return Traits(Sees.MODEL if differs else Sees.TENSORS, in_groups, frozenset(in_states))


@dataclass(frozen=True)
class MadeUp:
    """A parameter to try an optimizer on. Equal ones get equal values and gradients."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)  # what the optimizer has of it already


class Trial:
    """An optimizer like the user's, on made-up parameters of its own."""

    def __init__(self, optimizer: Optimizer, chosen: Sequence[MadeUp]) -> None:
        self.optimizer = bare_copy(optimizer)
        self._generators = [torch.Generator().manual_seed(one.number) for one in chosen]
        self.parameters = [self._draw(slot, one.shape, one.dtype) for slot, one in enumerate(chosen)]
        for group in sorted({one.group for one in chosen}):
            options = copy.deepcopy(options_of(optimizer.param_groups[group]))
            if "lr" in options and not options["lr"]:  # a warmup begins: nothing would be seen
                options["lr"] = 0.01
            own = [p for p, one in zip(self.parameters, chosen, strict=True) if one.group == group]
            self.optimizer.param_groups.append({**options, "params": own})
        for parameter, one in zip(self.parameters, chosen, strict=True):
            if one.state:
                self.optimizer.state[parameter] = copy.deepcopy(dict(one.state))

    def _draw(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self._generators[slot], dtype=wide).to(dtype)

    def update(self, number: int) -> None:
        """Make one update with made-up gradients; refuse an optimizer that cannot be updated like this."""
        for slot, parameter in enumerate(self.parameters):
            gradient = self._draw(slot, tuple(parameter.shape), parameter.dtype)
            parameter.grad = gradient * _SCALES[number % len(_SCALES)]
        before = _numbers(vars(self.optimizer))
        with torch.random.fork_rng(devices=[]):
            random = torch.get_rng_state()
            try:
                self.optimizer.step()
            except Exception as error:
                said = " ".join(str(error).split()) or "nothing is said"
                raise self._refusal(
                    f"owners call its step() with gradients and nothing else, which ends in {type(error).__name__} "
                    f"({said}); use one that needs no more"
                ) from error
            if not torch.equal(random, torch.get_rng_state()):
                raise self._refusal("it draws random numbers, which are others on every owner; use one that does not")
        after = _numbers(vars(self.optimizer))
        if changed := sorted(key for key in after if key not in before or not _same(before[key], after[key])):
            raise self._refusal(
                f"it changes its attribute {changed[0]!r}, which owners do not share; keep that in its groups or state"
            )

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What the optimizer keeps of a parameter by now."""
        kept = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in kept.items() if value is not None}

    def _refusal(self, why: str) -> ModelError:
        return ModelError("optimizer", type(self.optimizer).__name__, why)


def _refuse_wrapper(optimizer: Optimizer) -> None:
    """An optimizer that works on tensors other than those in its groups cannot be given others."""
    kind = type(optimizer).__name__
    users = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in vars(optimizer).items():
        if hasattr(value, "param_groups") and hasattr(value, "step"):
            raise ModelError(
                "optimizer",
                kind,
                f"it wraps an optimizer of its own ({key}: {type(value).__name__}), which owners do not see; give "
                "Trainer that one, and do what the wrapper does after trainer.step",
            )
        listed = value if key not in ("param_groups", "state") and isinstance(value, (list, tuple)) else ()
        if any(id(entry) in users for entry in listed):
            raise ModelError(
                "optimizer", kind, f"it keeps its parameters in {key!r} beside its groups; owners give it others"
            )


def _chosen(optimizer: Optimizer) -> list[MadeUp]:
    """The shapes of up to four small parameters: two of one group, if one has two, and some of other groups."""
    ranked = []
    for number, members in enumerate(group["params"] for group in optimizer.param_groups):
        by_size = sorted((p for p in members if p.numel()), key=lambda p: p.numel())
        ranked += [(rank, number, p) for rank, p in enumerate(by_size[:2])]
    seconds = [entry for entry in ranked if entry[0] == 1][:1]
    pair = [entry for entry in ranked if seconds and entry[1] == seconds[0][1]]
    others = [entry for entry in ranked if entry not in pair and entry[0] == 0]
    chosen = []
    for number, (_, group, p) in enumerate((pair + others)[:4]):
        wide = torch.complex128 if p.is_complex() else torch.float64
        state = {
            key: value.to(wide) if isinstance(value, torch.Tensor) and value.dtype == p.dtype else value
            for key, value in optimizer.state.get(p, {}).items()
        }
        chosen.append(MadeUp(group, tuple(p.shape), wide, number, state))
    return chosen


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """What may be counted in: copies of numbers and tensors, one level of lists and dicts deep."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("state", "param_groups", "defaults"):
            continue
        if isinstance(value, (list, tuple)):
            found |= _numbers({f"{key}[{index}]": entry for index, entry in enumerate(value)})
        elif isinstance(value, dict):
            found |= _numbers({f"{key}[{inner!r}]": entry for inner, entry in value.items()})
        elif isinstance(value, torch.Tensor):
            found[key] = value.clone()
        elif isinstance(value, (bool, int, float)):
            found[key] = value
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other) or (one != one and other != other)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, with no parameters and no state."""
    bare = copy.copy(optimizer)
    bare.__dict__.pop("step", None)  # a scheduler replaces it by a wrapper bound to the original
    bare.__dict__["state"] = defaultdict(dict)
    bare.__dict__.update({hooks: OrderedDict() for hooks in STEP_HOOKS})
    bare.param_groups = []
    return bare
