"""A server's journal: what it must not forget, on disk before anybody is told that it happened.

    snapshot-3   everything, as it was when log-3 began
    log-3        what came since: one record after another
    log-4        a newer log: the snapshot it begins with is being written, or its server died before it was
    mark         which snapshot and which record must be there

All of it has checksums, and records are numbered through (`record_file.py`); a snapshot has a number among them.

A process that is killed leaves a prefix of what it was writing: a record that the file ends in the middle of is cut
off, for nobody was told of it. If there was more, the mark knows (`mark.py`): a log that is missing, or ends before
what was acknowledged, is refused, and so is everything that does not fit its checksum, its number or its journal. What
a folder cannot know is that all of it was replaced by an older state of itself: a server that comes back behind the
others is refused by the chief, by the other servers, and by the replicas, who know which steps they were told of.

What is written survives the death of the process at once, because the kernel has it. A power cut, or a crash of the
machine, would lose the last seconds (as a rule up to 30), that is updates that were acknowledged, and servers may have
lost different ones; that is then found in one of these ways. `python -m benchmarks durability` measures what a log
costs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paceline.central.container.journal import Journal
from paceline.central.durability.mark import MARK, Mark
from paceline.central.durability.record_file import ADVICE, damaged, place, read_log, read_snapshot, sealed, write_all
from paceline.central.messages.notes import ShareNotes, Snapshot
from paceline.central.messages.records import AnyRecord, Body, Made, packed
from paceline.central.messages.tensor_bytes import entries_of
from paceline.checkpoint.saves import sync_folder
from paceline.errors import CheckpointError, PacelineError

LOG_BYTES = 1 << 29  # a log grows to this, or to some times the container, until there is a snapshot
LOG_TIMES = 4
LOG_STEPS = 1000  # and to no more than this: a restarted server has to make them again


class LogJournal(Journal):
    """The journal of one container on one server, in a folder."""

    keeps = True

    def __init__(
        self, folder: Path, *, container_bytes: int = 0, log_bytes: int | None = None, log_steps: int = LOG_STEPS
    ) -> None:
        super().__init__()
        self.folder = folder
        self.lock = threading.RLock()
        self._marking = threading.Lock()  # beside it: who holds the one may wait for whoever writes a snapshot
        self.container_bytes = container_bytes
        self._most_bytes = log_bytes
        self._most_steps = log_steps
        self._log = -1  # descriptor
        self._number = 0
        self._end = 0  # of the log
        self._mark, self._marks = Mark(secrets.randbits(64), 0, 0), -1  # and its descriptor
        self._record = 0  # number of the last one
        self._bytes = self._steps = 0  # since the last snapshot
        self._writer: threading.Thread | None = None
        self._refused: str | None = None  # why nothing is written: what it would follow is not there

    @property
    def newest_snapshot(self) -> Path:
        """Return the file that was read last."""
        return self.folder / f"snapshot-{self._number}"

    @property
    def last_record(self) -> str:
        """Return the number of the record that was read last, and the file."""
        return f"record {self._record} in {self._log_path(self._number)}"

    @property
    def begun(self) -> bool:
        """Whether there is a snapshot, and so something for a log to follow."""
        return self._log >= 0

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────

    def append(self, record: AnyRecord, body: Sequence[memoryview] = ()) -> None:
        """Have a record in the log; when this returns it survives the end of the process."""
        self.write(record, self.seal(record, body))

    def seal(self, record: AnyRecord, body: Sequence[memoryview]) -> list[memoryview]:
        """Return a record as it is in the file. Its checksum takes a while."""
        return sealed(record, body)

    def write(self, record: AnyRecord, parts: Sequence[memoryview]) -> int:
        """Append a sealed record: it survives this process, and there is nothing to `flush`."""
        if not self.begun:
            return 0
        with self.lock:
            if self._refused is not None:
                raise PacelineError(self._refused)
            try:
                place(parts, self._mark.journal, self._record + 1)
                end = write_all(self._log, parts, self._end)
                self._set_mark(self._mark.snapshot, self._record + 1)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._log, self._end)
                raise _cannot_write(self.folder, error) from error
            self._bytes += end - self._end
            self._end, self._record = end, self._record + 1
            self._steps += isinstance(record, Made)
            return 0

    def _set_mark(self, snapshot: int, record: int) -> None:
        """Have a mark that is not behind these, nor behind the one before."""
        with self._marking:
            mark = Mark(self._mark.journal, max(snapshot, self._mark.snapshot), max(record, self._mark.record))
            mark.write(self._marks)
            self._mark = mark

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def due(self) -> bool:
        """Whether the log has grown so long that a snapshot should take its place."""
        most = self._most_bytes if self._most_bytes is not None else max(LOG_BYTES, LOG_TIMES * self.container_bytes)
        long = self._bytes >= most or self._steps >= self._most_steps
        return long and (self._writer is None or not self._writer.is_alive())

    def snapshot(self, tensors: Mapping[str, torch.Tensor], notes: ShareNotes, *, wait: bool) -> None:
        """Begin a new log. Until its snapshot is there the old one and both logs are."""
        if wait and self._writer is not None:
            self._writer.join()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._marks < 0:
                self._marks = self._mark.create(self.folder)
            number = self._number + 1
            log = os.open(self._log_path(number), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        if self.begun:
            os.close(self._log)
        self._log, self._number, self._end = log, number, 0
        self._record += 1
        self._bytes = self._steps = 0
        if wait:
            # What it has may be in no record: if it is not there, nothing that follows must be.
            self._refused = self._write_snapshot(number, self._record, tensors, notes)
            if self._refused is not None:
                raise PacelineError(self._refused)
        else:
            how = {"target": self._write_snapshot, "args": (number, self._record, tensors, notes)}
            self._writer = threading.Thread(name="paceline-snapshot", daemon=True, **how)  # type: ignore[arg-type]
            self._writer.start()

    def _write_snapshot(
        self, number: int, record: int, tensors: Mapping[str, torch.Tensor], notes: ShareNotes
    ) -> str | None:
        """Return why it could not be written, if so."""
        path = self.folder / f"snapshot-{number}"
        draft = path.with_suffix(".tmp")
        try:
            parts = sealed(Snapshot(entries=entries_of(tensors.items()), notes=notes), packed(tensors.values()))
            place(parts, self._mark.journal, record)
            with draft.open("wb") as file:
                write_all(file.fileno(), parts, 0)
                os.fsync(file.fileno())
            draft.replace(path)
            sync_folder(self.folder)
            self._set_mark(number, record)
        except OSError as error:
            # The logs are still there, and go back to an older snapshot.
            failure = str(_cannot_write(self.folder, error))
            with contextlib.suppress(OSError):
                draft.unlink()
            with contextlib.suppress(OSError):  # what a server says may go to the same disk
                print(failure, file=sys.stderr, flush=True)
            return failure
        for older in _numbers(self.folder, "log") + _numbers(self.folder, "snapshot"):
            if older < number:
                for name in (f"log-{older}", f"snapshot-{older}", f"snapshot-{older}.tmp"):
                    (self.folder / name).unlink(missing_ok=True)
        return None

    def _log_path(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def read_snapshot(self) -> tuple[dict[str, torch.Tensor], ShareNotes] | None:
        """Return the newest one there is, and what was noted with it; None: the container had not begun."""
        mark, numbers = Mark.read(self.folder), _numbers(self.folder, "snapshot")
        if not numbers and not (mark.snapshot if mark is not None else self._any_log()):
            return None
        if mark is None:
            raise self._missing(MARK)
        self._mark, self._number = mark, max(numbers, default=0)
        if self._number < mark.snapshot:
            raise self._missing(f"snapshot-{mark.snapshot}")
        try:
            tensors, snapshot, self._record = read_snapshot(self.newest_snapshot, mark.journal)
        except OSError as error:
            raise _cannot_read(self.newest_snapshot, error) from error
        return tensors, snapshot.notes

    def records(self) -> Iterator[tuple[AnyRecord, Body]]:
        """What came after the snapshot, in order; a body is there until the next is read.

        When all is read, what is written goes behind it.
        """
        first, newest = self._number, max([*_numbers(self.folder, "log"), self._number])
        for number in range(first, newest + 1):
            self._number = number
            path, end, is_last = self._log_path(number), 0, number == newest
            self._record += number > first  # the number of the snapshot that would come before it
            try:
                log = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise self._missing(path.name) from error
            except OSError as error:
                raise _cannot_read(path, error) from error
            try:
                for record, body, stop in read_log(path, log, self._mark.journal, self._record + 1, is_last=is_last):
                    self._steps += isinstance(record, Made)
                    self._record += 1
                    end = stop
                    yield record, body
                if is_last and self._record < self._mark.record:
                    what = f"it ends with record {self._record}, and {self._mark.record} was acknowledged"
                    raise damaged(path, end, what)
                os.ftruncate(log, end)
            except BaseException:
                os.close(log)
                raise
            self._bytes += end
            if not is_last:
                os.close(log)
                continue
            self._marks = Mark.open(self.folder)
            self._log, self._end = log, end

    def _any_log(self) -> bool:
        return any(self._log_path(number).stat().st_size for number in _numbers(self.folder, "log"))

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / name} is missing, and was there; {ADVICE}")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join()
        with self.lock:
            if self.begun:
                os.close(self._log)
                os.close(self._marks)
                self._log = self._marks = -1

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _numbers(folder: Path, kind: str) -> list[int]:
    names = [path.name.partition("-") for path in folder.glob(f"{kind}-*")]
    return [int(number) for _, _, number in names if number.isdecimal()]


def _cannot_write(folder: Path, error: BaseException) -> PacelineError:
    why = getattr(error, "strerror", None) or str(error)
    advice = "make room there" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else "look at the disk"
    return PacelineError(f"the log of a server in {folder} cannot be written ({why}): {advice}, and run again")


def _cannot_read(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({error.strerror}); {ADVICE}")
