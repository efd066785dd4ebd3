"""What of all strategies is worth trying for a moment on this machine, and who can do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.profile.values import ShareTime, StepTrial
from paceline.rules import Async
from paceline.strategy import Centralized, Mirrored, Strategy

MOST_PROCESSES = 16  # that are forked for a trial
LONG_S = 0.3  # of the steps of one


class Trials(Protocol):
    """Makes steps of the script by a strategy, with copies of its model (`paceline.step_trials`)."""

    @property
    def possible(self) -> bool:
        """Whether any can be tried."""
        ...

    def measure(
        self, strategy: Strategy, cores: tuple[int, ...], guess_s: float, long_s: float, until: float
    ) -> StepTrial | None:
        """Returns what a step takes, or None if that cannot be told until then. `guess_s`: about so much."""
        ...


def worth_trying(cores: int, batch_size: int) -> list[Strategy]:
    """Returns those that have a core for each replica, what matters most first.

    >>> [strategy.flags() for strategy in worth_trying(1, 8)]
    [['--replicas', '2']]
    """
    found: list[Strategy] = []
    if cores > 1:
        found += [Mirrored(replicas=cores), Centralized(replicas=cores), Centralized(replicas=cores, rule=Async())]
    found.append(Mirrored(replicas=2 * cores))
    if cores > 1:
        found += [Centralized(replicas=cores, servers=2), Centralized(replicas=cores, exchange="tcp")]
    return [strategy for strategy in found if strategy.processes <= MOST_PROCESSES and strategy.replicas <= batch_size]


def about(strategy: Strategy, shares: Sequence[ShareTime], tried: Sequence[StepTrial], cores: int) -> float:
    """Returns about how long a step by a strategy takes: as long as the first that was tried, or as its computing."""
    if tried:
        return tried[0].timing.seconds * max(1.0, strategy.processes / tried[0].strategy.processes)
    samples = max(share.samples for share in shares) / strategy.replicas
    near = min((share for share in shares if share.threads == 1), key=lambda share: abs(share.samples - samples))
    return near.timing.seconds * max(1.0, strategy.processes / cores)
