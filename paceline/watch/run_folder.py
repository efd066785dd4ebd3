"""The run folder: what stays of a run.

    runs/20251115-184203-train/
      config.json               the resolved configuration, and where each value came from
      events.jsonl              what happened, a JSON object a line
      replica-0.log …           what each replica printed, with its stack dumps
      replica-1.failure.json    the exception that ended the run, if one did
      host-1/ …                 the same of the other hosts

The supervisor writes all of it but the failures, which each replica writes itself: a traceback has to survive its
process, and of several failing replicas the first one, by time, is the one to show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.errors import InvalidInput
from paceline.watch.events import AppendFile, EventLog

CONFIG = "config.json"
EVENTS = "events.jsonl"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that ended a replica."""

    time: float
    replica: int
    kind: str
    sentence: str
    traceback: str
    expected: bool  # one of Paceline's own errors: its sentence says everything

    @property
    def text(self) -> str:
        """What a user should see of it."""
        return self.sentence if self.expected else self.traceback

    def write(self, folder: Path) -> None:
        """Whole or not at all: the supervisor may be looking at this moment."""
        path = folder / failure_name(self.replica)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        os.replace(unfinished, path)


def log_name(replica: int) -> str:
    return f"replica-{replica}.log"


def failure_name(replica: int | str) -> str:
    return f"replica-{replica}.failure.json"


def choose_run_folder(given: str | None, script: str, *, host: int = 0, again: bool = False) -> Path:
    """Make the folder of a run; without a name of the user's, one that says when and what.

    Hosts may share a disk: each but the first has a folder of its own inside. `again`: one that was there before may
    come back, and has another one then.
    """
    if given is None:
        return _new_folder(Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(script).stem}", host)
    if not given:
        raise InvalidInput("run-folder", given, "give the name of a folder, or leave it out")
    path = _of_host(Path(given), host)
    if again and host and (path / CONFIG).exists():
        path = _new_folder(path.parent, path.name, 0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = (path / CONFIG).exists()
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise InvalidInput("run-folder", given, f"it cannot be made ({error.strerror}), give another") from error
    if taken:
        raise InvalidInput("run-folder", given, "it holds a run already, give a new folder or remove that one")
    if not writable:
        raise InvalidInput("run-folder", given, "it is not writable, give another")
    return path


def _new_folder(parent: Path, name: str, host: int) -> Path:
    for attempt in range(1, 1000):
        path = _of_host(parent / (name if attempt == 1 else f"{name}-{attempt}"), host)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            expected = f"it cannot be made ({error.strerror}), name another with --run-folder"
            raise InvalidInput("run-folder", str(path), expected) from error
        return path
    raise InvalidInput("run-folder", str(parent / name), "a thousand of them exist, name one with --run-folder")


def _of_host(path: Path, host: int) -> Path:
    return path / f"host-{host}" if host else path


class RunFolder:
    """The supervisor's hand on the folder. `say` takes the one line that tells of a full disk."""

    def __init__(self, path: Path, say: Callable[[str], None], *, host: int = 0) -> None:
        self.path = path
        self._of_all_hosts = path.parent if host else path
        self._say = say
        self._complained = False
        self.events = EventLog(AppendFile(path / EVENTS, self._complain))

    def write_config(self, config: dict[str, object]) -> None:
        file = AppendFile(self.path / CONFIG, self._complain)
        file.write(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
        file.close()

    def open_log(self, replica: int) -> AppendFile:
        return AppendFile(self.path / log_name(replica), self._complain)

    def has_failure(self, replica: int) -> bool:
        return (self.path / failure_name(replica)).exists()

    def forget_failure(self, replica: int) -> None:
        """A new process begins in this replica's place: what an earlier one left says nothing about it."""
        (self.path / failure_name(replica)).unlink(missing_ok=True)

    def first_failure(self) -> Failure | None:
        """The earliest exception of any replica, of another host too if its folder can be seen from here."""
        failures = []
        name = failure_name("*")
        for path in (*self._of_all_hosts.glob(name), *self._of_all_hosts.glob(f"host-*/{name}")):
            try:
                failures.append(msgspec.json.decode(path.read_bytes(), type=Failure))
            except (OSError, msgspec.DecodeError) as error:
                self._say(f"{path} cannot be read: {error}")
        return min(failures, key=lambda failure: failure.time, default=None)

    def close(self) -> None:
        self.events.close()

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"run folder {self.path} cannot be written ({error.strerror}): the run goes on without it")
