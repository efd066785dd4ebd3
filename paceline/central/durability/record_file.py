"""Records in files: sealed, so that whoever reads them finds what was written, or finds out that it is not that.

    │ magic │ journal │ number │ bytes of message │ bytes of body │ checksum of both │ of this head │ message │ body … │

`journal` is a number by chance, the same in all files of one journal: what is of another server, or of a container that
had the same name, does not fit. `number` goes up by one from record to record, over all logs of a journal: what was
taken away, put in twice or put in another place does not fit either.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from paceline.central.messages.notes import Snapshot
from paceline.central.messages.records import AnyRecord, Body
from paceline.central.messages.tensor_bytes import bytes_of, empty_tensors
from paceline.errors import CheckpointError, PacelineError
from paceline.net.frames import printable

ADVICE = "put the file back as it was, or remove its folder and go on from a checkpoint"

_HEAD = struct.Struct("<4sQQIQQQ")
_MAGIC = b"PLJ2"
_PLACE = struct.Struct("<QQ")  # of a head: journal and number, known last
_CHECKSUM = struct.Struct("<Q")  # of a head, at its end


@dataclass(frozen=True)
class Head:
    """What comes before a record."""

    journal: int
    number: int
    message_bytes: int
    body_bytes: int
    checksum: int  # of message and body
    start: int  # of the message, in the file

    @property
    def end(self) -> int:
        return self.start + self.message_bytes + self.body_bytes


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────


def sealed(record: AnyRecord | Snapshot, body: Sequence[memoryview]) -> list[memoryview]:
    """Return a record as it is in the file, but for its place there, which `place` fills in."""
    message = msgspec.msgpack.encode(record)
    total, size = xxhash.xxh3_64(message), 0
    for part in body:
        total.update(part)
        size += part.nbytes
    first = bytearray(_HEAD.pack(_MAGIC, 0, 0, len(message), size, total.intdigest(), 0)) + message
    return [memoryview(first), *body]


def place(parts: Sequence[memoryview], journal: int, number: int) -> None:
    """Give a sealed record its number in a journal."""
    head = parts[0][: _HEAD.size]
    _PLACE.pack_into(head, len(_MAGIC), journal, number)
    _CHECKSUM.pack_into(head, _HEAD.size - _CHECKSUM.size, xxhash.xxh3_64_intdigest(head[: -_CHECKSUM.size]))


def write_all(file: int, parts: Sequence[memoryview], offset: int) -> int:
    """Return where what was written ends."""
    for part in parts:
        view, done = part.cast("B"), 0
        while done < view.nbytes:
            done += os.pwrite(file, view[done:], offset + done)
        offset += done
    return offset


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_log(
    path: Path, log: int, journal: int, number: int, *, is_last: bool
) -> Iterator[tuple[AnyRecord, Body, int]]:
    """Yield every record, its body, and where it ends; the first has that number.

    What the file ends in the middle of was being written when its process was killed, and is left out.
    """
    offset, size, room = 0, os.fstat(log).st_size, bytearray()
    while offset < size:
        head = _read_head(path, log, offset, size)
        if head is None or head.end > size:
            break
        _check_place(path, head, journal, number, offset)
        length = head.end - head.start
        if len(room) < length:
            room = bytearray(length)  # not for every record: fresh memory costs more than reading
        content = memoryview(room)[:length]
        _read_exactly(path, log, content, head.start)
        if xxhash.xxh3_64_intdigest(content) != head.checksum:
            raise damaged(path, offset, "its checksum is not that of its content")
        record = _decoded(path, content[: head.message_bytes], AnyRecord, offset)
        offset, number = head.end, number + 1
        yield record, content[head.message_bytes :], offset
    if offset < size and not is_last:
        raise damaged(path, offset, "it ends in the middle of a record, and a newer log follows it")


def read_snapshot(path: Path, journal: int) -> tuple[dict[str, torch.Tensor], Snapshot, int]:
    """Return the tensors, what was noted with them, and the number of the snapshot among the records."""
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        head = _read_head(path, descriptor, 0, size)
        if head is None or head.end != size:
            raise damaged(path, 0, f"it has {size:,} bytes" + (f" instead of {head.end:,}" if head else ""))
        _check_place(path, head, journal, None, 0)
        message = memoryview(bytearray(head.message_bytes))
        _read_exactly(path, descriptor, message, head.start)
        snapshot: Snapshot = _decoded(path, message, Snapshot, 0)
        try:
            tensors = empty_tensors(snapshot.entries, head.body_bytes)
        except PacelineError as error:
            raise damaged(path, 0, str(error)) from error
        total, offset = xxhash.xxh3_64(message), head.start + head.message_bytes
        for tensor in tensors.values():
            content = bytes_of(tensor)
            _read_exactly(path, descriptor, content, offset)
            total.update(content)
            offset += content.nbytes
        if total.intdigest() != head.checksum:
            raise damaged(path, 0, "its checksum is not that of its content")
        return tensors, snapshot, head.number


def damaged(path: Path, offset: int, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged at byte {offset}: {printable(what)}; {ADVICE}")


def _read_head(path: Path, file: int, offset: int, size: int) -> Head | None:
    if size - offset < _HEAD.size:
        return None
    content = os.pread(file, _HEAD.size, offset)
    magic, journal, number, message_bytes, body_bytes, checksum, of_head = _HEAD.unpack(content)
    if magic != _MAGIC or of_head != xxhash.xxh3_64_intdigest(content[: -_CHECKSUM.size]):
        raise damaged(path, offset, "no record begins there")
    return Head(journal, number, message_bytes, body_bytes, checksum, offset + _HEAD.size)


def _check_place(path: Path, head: Head, journal: int, number: int | None, offset: int) -> None:
    if head.journal != journal:
        raise damaged(path, offset, "what is there was written by another server, or for another container")
    if number is not None and head.number != number:
        raise damaged(path, offset, f"record {head.number} is there, and {number} should be")


def _decoded(path: Path, message: memoryview, kind: Any, offset: int) -> Any:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError, PacelineError) as error:  # a rule refuses by itself
        raise damaged(path, offset, str(error)) from error


def _read_exactly(path: Path, file: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        read = os.preadv(file, [content[done : done + (1 << 30)]], offset + done)
        if not read:
            raise damaged(path, offset, "it became shorter while it was read")
        done += read
