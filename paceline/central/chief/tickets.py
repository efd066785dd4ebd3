"""What the chief, the servers and the replicas say of a step: who computes what, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paceline.data.book import Runs
from paceline.loss_value import NOTHING, LossPart
from paceline.rules import Async

# ── told to servers ──────────────────────────────────────────────────────────────────────────────────────────


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """One gradient of a step: whose, over which samples, and what it counts."""

    ticket: int
    replica: int
    weight: float
    samples: int
    staleness: int
    epoch: int
    runs: list[tuple[int, int]]
    unit: float = 1.0  # its gradient times this is that of its own mean loss


class Close(msgspec.Struct, frozen=True):
    """A step, as all servers have to make it. The chief knows replicas by their numbers in the run, servers by their
    places in the container."""

    step: int  # the version of the parameters that it is made of
    chapter: int
    samples: int
    loss: float
    accepted: list[Accepted]
    lr: float = 1.0
    compensation: float = 0.0
    logged: dict[str, float] = {}  # means of what losses log beside themselves

    def moved(self, by: int) -> Close:
        """Return the same with every replica so many places further on."""
        accepted = [msgspec.structs.replace(one, replica=one.replica + by) for one in self.accepted]
        return msgspec.structs.replace(self, accepted=accepted) if by else self


# ── told to replicas ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work:
    """A ticket, as its holder sees it."""

    ticket: int
    step: int  # of the run
    version: int  # compute on this one of the parameters, or on a later one
    epoch: int
    runs: Runs
    part: int  # which part of the step's batch this is
    exact: bool  # the step waits for this very ticket; else it may turn out to be late or stale
    following: tuple[int, Runs] | None = None  # epoch and samples that this replica will most likely get next


@dataclass(frozen=True)
class Wait:
    """Nothing to do now; `why` names what is waited for."""

    why: str


@dataclass(frozen=True)
class End:
    """Every sample that was asked for has been counted, or the run was asked to stop."""

    stop: bool = False


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a ticket: the step that took it, or none; how the last step went."""

    step: int | None
    loss: float
    samples: int
    logged: dict[str, float] = {}


# ── the chief's own ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class OpenTicket:
    work: Work
    replica: int
    chapter: int
    handed_at: float
    sync: bool  # the rule under which it was handed out
    pushed: bool = False
    pulled: int = 0
    loss: LossPart = NOTHING  # as if its samples were the whole batch

    @property
    def samples(self) -> int:
        return sum(map(len, self.work.runs))

    def staleness(self, version: int) -> int:
        """Return how many steps came after the parameters that it was computed on, when they are this version."""
        return max(0, version - self.pulled)

    def accepted(self, version: int, of: float, rule: Async | None) -> Accepted:
        """Return what it is in the step after that version, of so many samples, or of what its loss counts; an async
        `rule` weighs stale ones."""
        staleness = self.staleness(version)
        counted = self.loss.loss.count if self.loss.loss is not None else None
        size = self.samples if counted is None else self.loss.unit
        return Accepted(
            ticket=self.work.ticket,
            replica=self.replica,
            weight=size / of * (rule.weight(staleness) if rule is not None else 1.0),
            samples=self.samples,
            staleness=staleness,
            epoch=self.work.epoch,
            runs=[(run.start, run.stop) for run in self.work.runs],
            unit=self.loss.weight(counted),
        )
