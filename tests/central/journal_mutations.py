"""Ways to damage the folder of a journal, and what may come of it: the same state again, or a sentence.

Every mutation works on a folder that a training has left, with two snapshots and what came after the second, and has
another server's folder beside it, and older files of the same one.
"""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_recovery import Training

from paceline.central.durability.snapshot import save, waiting
from paceline.errors import PacelineError
from paceline.rules import Async

HEAD = struct.Struct("<4sQQIQQQ")  # of a record, written down once more: the file format is a promise


@dataclass(frozen=True)
class Left:
    """What trainings have left on disk, and what they were."""

    folder: Path  # of the journal
    older: Path  # the same, before the last snapshot
    other: Path  # of another server
    truth: list[Any]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def only(self, kind: str) -> Path:
        (path,) = self.folder.glob(f"{kind}*")
        return path


def state_of(training: Training) -> list[Any]:
    return [*training.state(), [(pushed, [part.tolist() for part in rows]) for pushed, rows in _waiting(training)]]


def _waiting(training: Training) -> list[tuple[Any, list[Any]]]:
    return [
        (pushed, [training.container.arena.gradients[pushed.replica], *(p for given in rows for p in given.tensors)])
        for pushed, rows in waiting(training.container)
    ]


def leave(folder: Path) -> Left:
    """Train, and keep what is on disk."""

    class Small(Training):
        shapes = ((12, 5), (7,))

    trainings = [Small(folder / name, Async(stale="compensate:0.5"), tables=True) for name in ("one", "other")]
    journals = [folder / name / "main%20one" for name in ("one", "other")]
    for training in trainings:
        training.train(2)
    shutil.copytree(journals[0], folder / "older")
    for training in trainings:
        save(training.share, wait=True)
        training.train(3)
        training.push(1, training.ask(1))
        training.container.journal.close()  # type: ignore[attr-defined]
    return Left(journals[0], folder / "older", journals[1], state_of(trainings[0]))


# ── mutations ────────────────────────────────────────────────────────────────────────────────────────────────


def records_of(path: Path) -> list[bytes]:
    content, found = path.read_bytes(), []
    while content:
        _, _, _, message, body, _, _ = HEAD.unpack(content[: HEAD.size])
        size = HEAD.size + message + body
        found.append(content[:size])
        content = content[size:]
    return found


def flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def flip_in_the_first_bytes(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place = chance.randrange(min(1500, len(content)))
    content[place] = (content[place] + chance.randrange(1, 256)) % 256
    path.write_bytes(content)
    return f"byte {place} changed"


def truncate(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    length = chance.choice([0, 1, len(content) - 1, chance.randrange(len(content))])
    path.write_bytes(content[:length])
    return f"cut to {length} of {len(content)} bytes"


def zero(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = chance.randrange(len(content))
    size = min(chance.choice([8, 64, 512, 4096]), len(content) - start)
    content[start : start + size] = bytes(size)
    path.write_bytes(content)
    return f"{size} bytes from {start} zeroed"


def append(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    extra = chance.choice([bytes(chance.randrange(1, 4096)), chance.randbytes(chance.randrange(1, 200)), content])
    path.write_bytes(content + extra)
    return f"{len(extra)} bytes appended"


def remove(path: Path, chance: random.Random) -> str:
    path.unlink()
    return "removed"


def change_records(path: Path, chance: random.Random) -> str:
    records = records_of(path)
    one, two = chance.randrange(len(records)), chance.randrange(len(records))
    how = chance.choice(["removed", "put in twice", "swapped", "cut off from", "moved to the end"])
    if how == "removed":
        del records[one]
    elif how == "put in twice":
        records.insert(two, records[one])
    elif how == "swapped":
        records[one], records[two] = records[two], records[one]
    elif how == "cut off from":
        del records[one:]
    else:
        records.append(records.pop(one))
    path.write_bytes(b"".join(records))
    return f"record {one} (and {two}) {how}"


def other_server(left: Left, chance: random.Random) -> str:
    """Some of the files, but not all: whose folder a server has is not known to the folder."""
    chosen = chance.sample(left.files, chance.randrange(1, len(left.files)))
    for path in chosen:
        shutil.copy(left.other / path.name, path)
    return f"{[path.name for path in chosen]} of another server"


def older_file(left: Left, chance: random.Random) -> str:
    source = chance.choice(sorted(left.older.iterdir()))
    target = chance.choice([left.folder / source.name, *left.files])
    shutil.copy(source, target)
    return f"{source.name} of before in the place of {target.name}"


def renamed(left: Left, chance: random.Random) -> str:
    path = chance.choice([left.only("log"), left.only("snapshot")])
    kind, _, number = path.name.partition("-")
    name = f"{kind}-{max(0, int(number) + chance.choice([-2, -1, 1, 2, 1000]))}"
    path.rename(left.folder / name)
    return f"{path.name} renamed to {name}"


def other_record(left: Left, chance: random.Random) -> str:
    """A record of another server, of the right number: its checksums are right."""
    mine, theirs = (records_of(folder / left.only("log").name) for folder in (left.folder, left.other))
    number = chance.randrange(min(len(mine), len(theirs)))
    mine[number] = theirs[number]
    left.only("log").write_bytes(b"".join(mine))
    return f"record {number} of another server"


OfFile = Callable[[Path, random.Random], str]
OF_FILES: tuple[OfFile, ...] = (flip, flip, flip_in_the_first_bytes, truncate, zero, append)
OF_LOGS: tuple[OfFile, ...] = (*OF_FILES, change_records, change_records, remove)
OF_FOLDERS = (other_server, older_file, renamed, other_record)


def mutate(left: Left, kind: str, chance: random.Random) -> str:
    """Damage the folder in one way, mostly a file of that kind; return in words how."""
    if chance.random() < 0.2:
        return chance.choice(OF_FOLDERS)(left, chance)
    path = left.only(kind)
    ways = {"log": OF_LOGS, "snapshot": (*OF_FILES, remove), "mark": (*OF_FILES, remove)}[kind]
    return f"{path.name}: {chance.choice(ways)(path, chance)}"


# ── what may come of it ──────────────────────────────────────────────────────────────────────────────────────


def outcome(left: Left) -> str:
    """Return `equal`, or the sentence that refuses; fails if it is another state, or another error."""
    found = Training.__new__(Training)
    found.folder = left.folder.parent
    try:
        found.killed()
    except PacelineError as error:
        sentence = str(error)
        assert str(left.folder) in sentence, sentence
        assert "\n" not in sentence, sentence
        return sentence
    try:
        assert state_of(found) == left.truth, "another state came back in silence"
        return "equal"
    finally:
        found.container.journal.close()  # type: ignore[attr-defined]
        found.share.close()


def campaign(left: Left, kind: str, chance: random.Random, count: int) -> dict[str, int]:
    """Damage the folder so many times, each time what was there at first; return how often it was equal, or refused."""
    kept = left.folder.parent.with_name("kept")
    shutil.copytree(left.folder, kept)
    counts, words = {"equal": 0, "refused": 0}, ""
    try:
        for _ in range(count):
            words = mutate(left, kind, chance)
            counts["equal" if outcome(left) == "equal" else "refused"] += 1
            shutil.rmtree(left.folder)
            shutil.copytree(kept, left.folder)
    except BaseException:
        print(words)
        shutil.rmtree(left.folder)
        shutil.copytree(kept, left.folder)
        raise
    finally:
        shutil.rmtree(kept)
    return counts
