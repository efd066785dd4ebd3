"""Where the results of a search stay: one that was stopped, or killed, goes on where it was.

runs/train-tune-5f3a9c01/       the same command has the same folder
  tune.json                     what was asked for
  identity                      some letters that no other search has, for what it names elsewhere
  trial-0007/                   `pl.trial().folder`: what the script writes there, its checkpoint above all
    values.json                 its parameters
    run-1/, run-1.out           the run folder, and what the run printed; run-2 after a kill
    result.json                 what came of it; a trial without one is made again, or goes on from its checkpoint
    fold-3/ …                   the same for each fold
  top/                          checkpoints of the best
  leaderboard.json, leaderboard.md, leaderboard.png
  optuna.journal                for optuna-dashboard
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import xxhash

from paceline.checkpoint_note import CheckpointNote
from paceline.errors import InvalidInput
from paceline.trial_values import Value
from paceline.watch.kept_folder import open_kept, write_whole

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

ASKED = "tune.json"
VALUES = "values.json"
RESULT = "result.json"
CLOCK = "clock.json"
IDENTITY = "identity"
LOCK = "in-use"
JOURNAL = "optuna.journal"

Kept = TypeVar("Kept")
TrialEnd = Literal["done", "pruned", "failed"]


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one trial."""

    number: int
    values: dict[str, Value]
    end: TrialEnd
    metric: float | None  # the last that was told, or the mean of the folds'
    folds: list[float] = []
    told: list[tuple[int, float | None]] = []  # steps, and the metric there; None: not a number
    steps: int = 0
    seconds: float  # that its runs took
    at_s: float  # of the search, when it ended
    began: float  # time of day
    ended: float
    starts: int = 1  # of its runs
    checkpoints: list[str] = []  # in the folder of the search
    notes: list[CheckpointNote] = []  # of each of these
    error: str | None = None
    rungs: dict[str, float] = {}  # what the pruner has noted

    def as_optuna(self, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
        """The same as Optuna has it."""
        from optuna.trial import TrialState, create_trial

        states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        trial = create_trial(
            state=states[self.end],
            value=self.metric if self.end == "done" else None,
            params=dict(self.values),
            distributions=distributions,
            intermediate_values={
                place: float("nan") if value is None else value for place, (_, value) in enumerate(self.told, 1)
            },
            system_attrs=dict(self.rungs),
        )
        trial.datetime_start, trial.datetime_complete = map(datetime.datetime.fromtimestamp, (self.began, self.ended))
        return trial


class TuneFolder:
    """The folder of one search."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock  # for as long as this process lives

    @classmethod
    def open(cls, given: str | None, script: str, asked: Mapping[str, Any]) -> TuneFolder:
        """A new one, or the one in which the same was asked for before."""
        path = Path(given) if given is not None else _named_after(script, asked)
        open_kept(path, ASKED, "a search", asked)
        with contextlib.ExitStack() as undone:
            lock = undone.enter_context((path / LOCK).open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                expected = "another paceline tune is at work in it, wait or end it"
                raise InvalidInput("folder", str(path), expected) from error
            if not (path / IDENTITY).exists():
                write_whole(path / IDENTITY, secrets.token_hex(4).encode())
            undone.pop_all()
        return cls(path, lock)

    def close(self) -> None:
        """Let another search have it."""
        self._lock.close()

    def trial_folder(self, number: int) -> Path:
        return self.path / f"trial-{number:04}"

    def values_of(self, number: int) -> dict[str, Value] | None:
        """The values of a trial that was begun before."""
        return _read(self.trial_folder(number) / VALUES, dict[str, Value])

    def begin(self, number: int, values: dict[str, Value]) -> None:
        """Write down the values of a trial, before anything of it is started."""
        self.trial_folder(number).mkdir(exist_ok=True)
        write_whole(self.trial_folder(number) / VALUES, msgspec.json.encode(values))

    def record_of(self, number: int) -> TrialRecord | None:
        """What came of a trial that has ended."""
        return _read(self.trial_folder(number) / RESULT, TrialRecord)

    def keep(self, record: TrialRecord) -> None:
        write_whole(self.trial_folder(record.number) / RESULT, msgspec.json.encode(record))

    def begun(self) -> list[int]:
        """The trials that have values."""
        return sorted(int(path.parent.name[6:]) for path in self.path.glob(f"trial-*/{VALUES}"))

    @property
    def seconds(self) -> float:
        """How long the search has taken in all its starts so far."""
        return _read(self.path / CLOCK, float) or 0.0

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            write_whole(self.path / CLOCK, msgspec.json.encode(round(seconds, 3)))

    def write(self, name: str, data: bytes) -> Path:
        write_whole(self.path / name, data)
        return self.path / name


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


def identity_of(folder: Path) -> str:
    """What tells this search from all others, also from one that was in a folder of this name before."""
    return (folder / IDENTITY).read_text().strip()


def _named_after(script: str, asked: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh64(msgspec.json.encode(asked, order="deterministic")).hexdigest()[:8]
    return Path("runs") / f"{Path(script).stem}-tune-{digest}"
