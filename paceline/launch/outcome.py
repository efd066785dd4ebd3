"""How a run ended, as one value: for its last event, its summary, `--json`, and whoever compares runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.job import RunJob
from paceline.launch.regular_look import RegularLook
from paceline.launch.restarts import Restarts
from paceline.machine import shared_words_work
from paceline.watch.found import FoundValue, TargetSeen
from paceline.watch.target import NOT_REACHED

LINK_VARIABLE = "GLOO_SOCKET_IFNAME"  # the name of an emulated host's link
_SENT_COLUMN = 8  # of /proc/net/dev, behind the name


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    exit_code: int
    steps: int
    resumed_at: int  # of these steps, those that an earlier run had made
    seconds: float
    samples_per_second: float
    deaths: int
    restarts: int
    loss: float | None
    samples: int = 0  # that were trained on, as far as anybody counts them
    found: dict[str, FoundValue] = field(default_factory=dict)  # the last of each name
    target: TargetSeen | None = None
    saved: str | None = None  # the last checkpoint that the script has written
    kept: list[str] = field(default_factory=list)  # models of a script that has written none, in the run folder
    stopped_by: str | None = None  # until, longest or most-steps
    late: int | None = None  # gradients that came too late; None: there are no servers
    dropped: int | None = None  # that were too stale
    staleness: float | None = None  # mean, of those that were used
    thrown_away: float | None = None  # share of all gradients
    cutting_s: float | None = None  # how long it took to find out how the model is cut; None: it is not cut
    bytes_sent: int | None = None  # by this host over its link; None: nobody has counted


def outcome_of(
    job: RunJob,
    look: RegularLook,
    restarts: Restarts,
    exit_code: int,
    seconds: float,
    stopped_by: str | None,
    sent: int,
    models: Path,
) -> RunOutcome:
    """The outcome of a run that has ended with that code. `sent`: what the host's link had carried before it. `models`:
    where those are kept that the script has not saved."""
    progress, found, account = look.progress, look.found, look.found.account
    target = found.target_seen
    if exit_code == 0 and job.shown and target is not None and target.reached is None:
        exit_code = NOT_REACHED
    return RunOutcome(
        exit_code=exit_code,
        steps=progress.step,
        resumed_at=progress.resumed_at,
        seconds=round(seconds, 3),
        samples_per_second=round(look.meter.overall_samples_per_s, 1),
        deaths=restarts.deaths,
        restarts=restarts.made,
        loss=progress.loss,
        samples=progress.samples,
        found=dict(found.latest),
        target=target,
        saved=found.saved,
        kept=[str(path) for path in kept_models(models)] if found.saved is None else [],
        stopped_by=stopped_by,
        late=account.late if account is not None else None,
        dropped=account.dropped if account is not None else None,
        staleness=round(account.mean_staleness, 4) if account is not None else None,
        thrown_away=round(account.thrown_away, 4) if account is not None else None,
        cutting_s=round(found.cutting_s, 3) if found.cutting_s is not None else None,
        bytes_sent=_bytes_sent(job, sent),
    )


def kept_models(folder: Path) -> list[Path]:
    """Models that a run has kept there, in order; not what stands beside them to go on from."""
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.endswith(".training.safetensors"))


def _bytes_sent(job: RunJob, before: int) -> int | None:
    """What this host has sent: of emulated hosts the kernel counts it, and what shares memory sends nothing."""
    place = job.place
    if place.hosts > 1:
        return link_bytes() - before if LINK_VARIABLE in os.environ else None
    shares = place.strategy.exchange in ("auto", "shared") and place.servers is None and shared_words_work()
    return 0 if shares else None


def link_bytes() -> int:
    """What the link of this emulated host has carried away so far; 0 if it is none."""
    name = os.environ.get(LINK_VARIABLE)
    for line in Path("/proc/self/net/dev").read_text().splitlines() if name else ():
        interface, _, counts = line.partition(":")
        if interface.strip() == name:
            return int(counts.split()[_SENT_COLUMN])
    return 0
