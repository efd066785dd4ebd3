"""`pl.Ensemble`: several models are asked together, and answer as one, with those that are in time.

    ensemble = pl.Ensemble([first, second, third], quorum=2, where="between")
    answer = ensemble(image, timeout_s=0.3)
    answer.value      # of the same kind as a member's answer
    answer.members    # who is in it
    answer.missing    # who is not, and why

With `where="here"` members are threads of this process, with `where="between"` a process each. The numbers are the
same: each member computes with one thread of torch, on the cores that are its own.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from paceline.combining import Combination, How, Kind
from paceline.deadlines import check_limit, shortest
from paceline.ensemble.combining import combined
from paceline.ensemble.members_between import MembersBetween
from paceline.ensemble.members_here import MembersHere
from paceline.ensemble.placement import place_members
from paceline.ensemble.question import AskedMembers, Question
from paceline.errors import DeadlineExceeded, InvalidInput, PacelineError, ReplicaDied
from paceline.serve.predictor import Predictor

Where = Literal["here", "between"]


@dataclass(frozen=True)
class EnsembleAnswer:
    """What an ensemble has answered: the combined value, by whom, and who is missing for which reason."""

    value: torch.Tensor
    members: tuple[str, ...]
    missing: dict[str, str]
    answers: dict[str, torch.Tensor]  # of each member by itself


class Ensemble:
    """Answers with what its members say together: `ensemble(*args)` asks each of them for `member(*args)`.

    Threads may share it: questions are asked side by side. Close it, or use it as a context manager, to end its threads
    or processes before this process ends.
    """

    def __init__(
        self,
        members: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
        *,
        combine: How = "mean",
        outputs: Kind = "logits",
        weights: Sequence[float] | None = None,
        class_dim: int = -1,
        devices: Sequence[Any] | None = None,
        quorum: int | None = None,
        where: Where = "here",
    ) -> None:
        """`members`: modules or predictors, in a list or by name. `combine`: the mean of probabilities, the majority,
        or with `weights` a weighted mean, or stacked. `outputs` says what a member answers with: logits, probabilities,
        values (a regression) or labels; `class_dim` where its classes lie. `devices`: one a member, such as "cpu:1" for
        a core. `quorum`: how many members an answer needs, by default more than half.
        """
        if not isinstance(members, Sequence | Mapping) or isinstance(members, str):
            raise InvalidInput("members", type(members).__name__, "give a list of models, or models by name")
        by_name = dict(members) if isinstance(members, Mapping) else {str(at): it for at, it in enumerate(members)}
        count = len(by_name)
        _check_members(by_name)
        self._combination = Combination(combine, outputs, class_dim, None if weights is None else tuple(weights))
        self._combination.check(count)
        self.quorum = self._combination.quorum(quorum, count)
        if where not in ("here", "between"):
            raise InvalidInput("where", where, "give 'here' (threads of this process) or 'between' (a process each)")
        self.names = tuple(by_name)
        models = [_in_this_form(name, member, where) for name, member in by_name.items()]
        places = place_members(devices, count)
        if where == "here":
            for model, place in zip(models, places, strict=True):
                if isinstance(model, nn.Module) and place.torch_device is not None:
                    model.to(place.torch_device)
        self.asked: AskedMembers
        self.asked = MembersHere(models, places) if where == "here" else MembersBetween(models, self.names, places)
        self._process = os.getpid()
        self._end = weakref.finalize(self, _close_in, self._process, self.asked)

    def __call__(self, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> EnsembleAnswer:
        """Returns the answer of the members that have one within `timeout_s`, or within `pl.deadline` around it."""
        limit_s = shortest(None if timeout_s is None else check_limit("timeout_s", timeout_s))
        until = None if limit_s is None else time.monotonic() + limit_s
        if not self._end.alive:
            raise PacelineError("this ensemble was closed: make another")
        if os.getpid() != self._process:
            raise PacelineError("this ensemble belongs to the process that made it: make another in this one")
        question = Question(args, kwargs, len(self.names))
        self.asked.ask(question)
        question.wait(until)
        if len(question.answers) < self.quorum:
            raise self._too_few(question, limit_s, until)
        arrived = sorted(question.answers)
        value = combined(self._combination, [question.answers[member] for member in arrived], arrived)
        missing = {
            name: question.failures.get(member, f"it was not done within {limit_s or 0:g} s")
            for member, name in enumerate(self.names)
            if member not in question.answers
        }
        answers = {self.names[member]: question.answers[member] for member in arrived}
        return EnsembleAnswer(value, tuple(self.names[member] for member in arrived), missing, answers)

    def _too_few(self, question: Question, limit_s: float | None, until: float | None) -> PacelineError:
        """Returns the error that says who is missing in an answer."""
        late = [
            name
            for member, name in enumerate(self.names)
            if member not in question.answers and member not in question.failures
        ]
        if late and limit_s is not None and until is not None:
            who = f"member {', '.join(map(repr, late))}"
            return DeadlineExceeded(who, limit_s, max(0.0, time.monotonic() - until))
        reasons = "; ".join(f"{self.names[member]!r}: {reason}" for member, reason in question.failures.items())
        arrived = len(question.answers)
        return ReplicaDied(
            f"{arrived} of {len(self.names)} members answered and the quorum is {self.quorum} ({reasons})"
        )

    def close(self) -> None:
        """Ends the members' threads or processes. Later questions are refused."""
        self._end()

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_this_form(name: str, member: Callable[..., Any], where: Where) -> Callable[..., Any]:
    """Returns what is asked: of a predictor its model, which may go to another process, unless it is cut."""
    if not isinstance(member, Predictor):
        return member
    if (model := member.whole_model) is not None:
        return model
    if where == "between":
        raise InvalidInput("where", where, f"member {name!r} is cut over devices of this process, give 'here'")
    return member


def _check_members(by_name: Mapping[str, Callable[..., Any]]) -> None:
    if not by_name:
        raise InvalidInput("members", [], "give at least one model")
    seen: dict[int, str] = {}
    for name, member in by_name.items():
        if not callable(member):
            expected = "give models, made by pl.load or of torch"
            raise InvalidInput(f"member {name!r}", type(member).__name__, expected)
        if id(member) in seen:
            expected = f"this is the same object as member {seen[id(member)]!r}, give different ones"
            raise InvalidInput(f"member {name!r}", type(member).__name__, expected)
        seen[id(member)] = name


def _close_in(process: int, asked: AskedMembers) -> None:
    """Ends the members, in the process that they are of."""
    if os.getpid() == process:
        asked.close()
