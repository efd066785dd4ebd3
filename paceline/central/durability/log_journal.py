"""A server's journal: what it must not forget, on disk before anybody is told that it happened.

    snapshot-3   everything, as it was when log-3 began (safetensors)
    log-3        what came since: one record after another
    log-4        a newer log: the snapshot it begins with is being written, or its server died before it was

A record is a head of fixed size, a message, and bytes:

    │ magic │ bytes of message │ bytes of body │ crc of both │ crc of this head │ message │ body … │

A process that is killed leaves a prefix of what it was writing: a record that the file ends in the middle of is cut
off, for nobody was told of it. Any other record that does not fit its checksum is damage, and refused.

What is written survives the death of the process at once, because the kernel has it. A power cut, or a crash of the
machine, would lose the last seconds (as a rule up to 30), that is updates that were acknowledged, and servers may have
lost different ones. `python -m benchmarks durability` measures what a log costs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.central.container.journal import Journal
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord, Body, Made
from paceline.errors import CheckpointError, PacelineError

LOG_BYTES = 1 << 29  # a log grows to this, or to some times the container, until there is a snapshot
LOG_TIMES = 4
LOG_STEPS = 1000  # and to no more than this: a restarted server has to make them again

_HEAD = struct.Struct("<4sIQII")
_MAGIC = b"PLJ1"
NOTES = "notes"  # in a snapshot: `ShareNotes`, as bytes


class LogJournal(Journal):
    """The journal of one container on one server, in a folder."""

    keeps = True

    def __init__(
        self, folder: Path, *, container_bytes: int = 0, log_bytes: int | None = None, log_steps: int = LOG_STEPS
    ) -> None:
        super().__init__()
        self.folder = folder
        self.lock = threading.RLock()
        self.container_bytes = container_bytes
        self._most_bytes = log_bytes
        self._most_steps = log_steps
        self._log = -1  # descriptor
        self._number = 0
        self._end = 0  # of the log
        self._bytes = self._steps = 0  # since the last snapshot
        self._writer: threading.Thread | None = None
        self._failure: str | None = None  # of the writer

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
            start = self._end
            try:
                for part in parts:
                    self._end += _write_all(self._log, part, self._end)
            except OSError as error:
                self._end = start
                with contextlib.suppress(OSError):
                    os.ftruncate(self._log, start)
                raise _cannot_write(self.folder, error) from error
            self._bytes += self._end - start
            self._steps += isinstance(record, Made)
            return 0

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
            number = self._number + 1
            log = os.open(self._log_path(number), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        if self.begun:
            os.close(self._log)
        self._log, self._number, self._end = log, number, 0
        self._bytes = self._steps = 0
        self._failure = None
        if wait:
            self._write_snapshot(number, tensors, notes)
            if self._failure is not None:
                raise PacelineError(self._failure)
        else:
            how = {"target": self._write_snapshot, "args": (number, tensors, notes)}
            self._writer = threading.Thread(name="paceline-snapshot", daemon=True, **how)  # type: ignore[arg-type]
            self._writer.start()

    def _write_snapshot(self, number: int, tensors: Mapping[str, torch.Tensor], notes: ShareNotes) -> None:
        path = self.folder / f"snapshot-{number}"
        draft = path.with_suffix(".tmp")
        try:
            encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(notes)), dtype=torch.uint8)
            save_file({**tensors, NOTES: encoded}, draft)
            with draft.open("rb") as written:
                os.fsync(written.fileno())
            draft.replace(path)
            _flush_folder(self.folder)
        except (OSError, SafetensorError) as error:
            # The logs are still there, and go back to an older snapshot.
            self._failure = str(_cannot_write(self.folder, error))
            print(self._failure, file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                draft.unlink()
            return
        for older in _numbers(self.folder, "log") + _numbers(self.folder, "snapshot"):
            if older < number:
                for name in (f"log-{older}", f"snapshot-{older}"):
                    (self.folder / name).unlink(missing_ok=True)

    def _log_path(self, number: int) -> Path:
        return self.folder / f"log-{number}"

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def read_snapshot(self) -> tuple[dict[str, torch.Tensor], ShareNotes] | None:
        """Return the newest one there is, and what was noted with it; None: the container had not begun."""
        numbers = _numbers(self.folder, "snapshot")
        if not numbers:
            return None
        self._number = max(numbers)
        path = self.folder / f"snapshot-{self._number}"
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                notes = msgspec.msgpack.decode(tensors.pop(NOTES).numpy().data, type=ShareNotes)
                return tensors, notes
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove its folder to begin anew") from error

    def records(self) -> Iterator[tuple[AnyRecord, Body]]:
        """What came after the snapshot, in order; a body is there until the next is read.

        When all is read, what is written goes behind it.
        """
        numbers = [number for number in sorted(_numbers(self.folder, "log")) if number >= self._number]
        numbers = numbers or [self._number]
        for number in numbers:
            path = self._log_path(number)
            log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                end = 0
                for record, body, stop in _read_log(path, log, may_be_torn=number == numbers[-1]):
                    self._steps += isinstance(record, Made)
                    end = stop
                    yield record, body
                os.ftruncate(log, end)
            except BaseException:
                os.close(log)
                raise
            self._bytes += end
            if number != numbers[-1]:
                os.close(log)
                continue
            self._log, self._number, self._end = log, number, end

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join()
        with self.lock:
            if self.begun:
                os.close(self._log)
                self._log = -1

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def sealed(record: AnyRecord, body: Sequence[memoryview]) -> list[memoryview]:
    """Return a record as it is in the file."""
    message = msgspec.msgpack.encode(record)
    crc, size = zlib.crc32(message), 0
    for part in body:
        crc, size = zlib.crc32(part, crc), size + part.nbytes
    return [memoryview(_head(len(message), size, crc) + message), *body]


def _head(message_bytes: int, body_bytes: int, crc: int) -> bytes:
    return _HEAD.pack(_MAGIC, message_bytes, body_bytes, crc, _head_crc(message_bytes, body_bytes, crc))


def _head_crc(message_bytes: int, body_bytes: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<IQI", message_bytes, body_bytes, crc))


def _read_log(path: Path, log: int, *, may_be_torn: bool) -> Iterator[tuple[AnyRecord, Body, int]]:
    """Yield every record, its body, and where it ends."""
    offset, size, room = 0, os.fstat(log).st_size, bytearray()

    def damage(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged at byte {offset}: {what}; what came after it cannot be trusted")

    while offset < size:
        if size - offset < _HEAD.size:
            break
        magic, message_bytes, body_bytes, crc, head_crc = _HEAD.unpack(os.pread(log, _HEAD.size, offset))
        if magic != _MAGIC or head_crc != _head_crc(message_bytes, body_bytes, crc):
            raise damage("no record begins there")
        first = offset + _HEAD.size
        end = first + message_bytes + body_bytes
        if end > size:
            break
        if len(room) < end - first:
            room = bytearray(end - first)  # not for every record: fresh memory costs more than reading
        content = memoryview(room)[: end - first]
        _read_exactly(log, content, first)
        if zlib.crc32(content) != crc:
            raise damage("its checksum is not that of its content")
        try:
            record = msgspec.msgpack.decode(content[:message_bytes], type=AnyRecord)
        except msgspec.MsgspecError as error:
            raise damage(str(error)) from error
        offset = end
        yield record, content[message_bytes:], end
    if offset < size and not may_be_torn:
        raise damage("it ends in the middle of a record, and a newer log follows it")


def _read_exactly(log: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.preadv(log, [content[done : done + (1 << 30)]], offset + done)


def _write_all(log: int, part: memoryview, offset: int) -> int:
    view = part.cast("B")
    done = 0
    while done < view.nbytes:
        done += os.pwrite(log, view[done:], offset + done)
    return done


def _numbers(folder: Path, kind: str) -> list[int]:
    names = [path.name.partition("-") for path in folder.glob(f"{kind}-*")]
    return [int(number) for _, _, number in names if number.isdecimal()]


def _cannot_write(folder: Path, error: BaseException) -> PacelineError:
    why = getattr(error, "strerror", None) or str(error)
    advice = "make room there" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else "look at the disk"
    return PacelineError(f"the log of a server in {folder} cannot be written ({why}): {advice}, and run again")


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
