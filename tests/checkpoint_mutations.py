"""Damaged saves, thousands of them: resuming from one goes on exactly as from the save itself, or is refused by name.

Run by `test_checkpoint_mutations.py`, in a process of its own, since a damaged file might well end it:
`python checkpoint_mutations.py COUNT SEED`.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline import checkpoint

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
MOST_SECONDS = 10.0

# ── a run that is saved and resumed ──────────────────────────────────────────────────────────────────────────


def new_trainer() -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9])
    return pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), scheduler=schedule, clip_norm=1.0)


def train(trainer: pl.Trainer, steps: int, save: Callable[[], None] = lambda: None) -> None:
    for batch in trainer.batches(X, 8, epochs=4, seed=3):
        trainer.step(batch)
        save()
        if trainer.steps == steps:
            return


def saved(folder: Path) -> Path:
    """Two saves, the second in the middle of an epoch and after an evaluation."""
    trainer, path = new_trainer(), folder / "model.safetensors"
    train(trainer, 7, lambda: trainer.save(path) if trainer.steps in (5, 7) else None)
    return path


def outcome(path: Path) -> str:
    """A digest of everything that a resumed run comes to."""
    trainer = new_trainer()
    if not trainer.resume(path):
        return "there is no such file"
    steps = trainer.steps
    train(trainer, 12)
    digest = hashlib.sha256(f"{steps} {trainer.steps} {trainer.ledger.check()}".encode())
    for value in trainer.model.state_dict().values():
        digest.update(value.numpy().tobytes())
    for state in trainer.optimizer.state.values():
        for value in state.values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest() + json.dumps([group["lr"] for group in trainer.optimizer.param_groups])


def model_of(path: Path) -> dict[str, bytes]:
    """The model alone, as `pl.load` reads it."""
    return {name: value.numpy().tobytes() for name, value in checkpoint.read_model(path).items()}


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────


class Save:
    """The files of a save, to be damaged."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.model = folder / "model.safetensors"
        self.previous = folder / "model.previous.safetensors"
        self.older, self.training = sorted(folder.glob("*.training.safetensors"))

    def one(self) -> Path:
        return self.chance.choice([self.model, self.training])

    def change(self, path: Path, change: Callable[[bytearray], Any]) -> None:
        data = bytearray(path.read_bytes())
        path.write_bytes(change(data) or data)

    def header(self, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        """Write the header anew, as another program would."""
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    def notes(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Forge the notes: with the checksum that belongs to them."""

        def forge(header: dict[str, Any]) -> None:
            metadata = header["__metadata__"]
            contents = json.loads(metadata["paceline.contents"])
            change(contents["notes"])
            text = metadata["paceline.contents"] = json.dumps(contents, separators=(",", ":"))
            metadata["paceline.contents.crc32"] = f"{zlib.crc32(text.encode()):08x}"

        self.header(self.model, forge)


def flip(save: Save) -> None:
    def change(data: bytearray) -> None:
        length = 8 + struct.unpack("<Q", bytes(data[:8]))[0]
        for _ in range(save.chance.choice([1, 1, 2, 5])):
            where = save.chance.choice([range(8), range(8, length), range(length, len(data))])
            data[save.chance.choice(where)] ^= 1 << save.chance.randrange(8)

    save.change(save.one(), change)


def cut_short(save: Save) -> None:
    save.change(save.one(), lambda data: data[: save.chance.randrange(len(data))])


def longer(save: Save) -> None:
    save.change(save.one(), lambda data: data + bytes(save.chance.choice([1, 8, 4096])))


def blank(save: Save) -> None:
    def change(data: bytearray) -> None:
        start = save.chance.randrange(len(data))
        size = min(len(data) - start, save.chance.choice([1, 16, 512, 4096]))
        data[start : start + size] = bytes(size) if save.chance.random() < 0.5 else save.chance.randbytes(size)

    save.change(save.one(), change)


def moved(save: Save) -> None:
    """Bytes from elsewhere in the file, as a disk that writes to the wrong place leaves them."""

    def change(data: bytearray) -> None:
        size = save.chance.choice([8, 512])
        source, target = (save.chance.randrange(len(data) - size) for _ in range(2))
        data[target : target + size] = data[source : source + size]

    save.change(save.one(), change)


def swapped(save: Save) -> None:
    files = [save.model, save.training, save.previous, save.older]
    one, other = save.chance.sample(files, 2)
    aside = one.read_bytes()
    one.write_bytes(other.read_bytes())
    if save.chance.random() < 0.5:
        other.write_bytes(aside)


def gone(save: Save) -> None:
    save.training.unlink()


def long_header(save: Save) -> None:
    lengths = [0, 1, 1 << 20, 99_999_999, 100_000_001, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]
    save.change(save.one(), lambda data: struct.pack("<Q", save.chance.choice(lengths)) + data[8:])


def other_version(save: Save) -> None:
    value = save.chance.choice(["", "0", "1", "3", "2 ", None])

    def change(header: dict[str, Any]) -> None:
        header["__metadata__"] |= {"paceline": value}
        if value is None:
            del header["__metadata__"]["paceline"]

    save.header(save.model, change)


def metadata(save: Save) -> None:
    def change(header: dict[str, Any]) -> None:
        found = header.get("__metadata__", {})
        key = save.chance.choice([*found, "another"])
        if save.chance.random() < 0.4:
            found.pop(key, None)
        else:
            found[key] = save.chance.choice(["", "x", "../" + save.older.name, save.older.name, "{}", "[" * 5000, "\0"])

    save.header(save.one(), change)


def entries(save: Save) -> None:
    """Entries of the header that are removed, added, renamed, retyped, reshaped, or that change places."""

    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name != "__metadata__"]
        one, other = save.chance.sample(names, 2)
        match save.chance.randrange(9):
            case 0:
                del header[one]
            case 1:
                header["another"] = header[one]
            case 2:
                header["another"] = header.pop(one)
            case 3:
                header[one]["dtype"] = save.chance.choice(["I32", "F16", "U8", "BF16", "F64", "X", 3])
            case 4:
                header[one]["shape"] = save.chance.choice(
                    [[], [1 << 62, 4], [-1], header[one]["shape"][::-1], [1], "8"]
                )
            case 5:
                header[one], header[other] = header[other], header[one]
            case 6:
                header[one]["data_offsets"] = save.chance.choice([[0, 1 << 62], [8, 0], header[other]["data_offsets"]])
            case 7:
                header[one] = save.chance.choice([None, 3, [], {}])
            case 8:
                header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": header[one]["data_offsets"][:1] * 2}

    save.header(save.one(), change)


def forged(save: Save) -> None:
    """Something in the notes is of another type, absent, or far too large, and the checksum is that of these notes."""
    # Not what the user's own optimizer or scheduler alone could find wrong: another number, another choice.
    odd = [None, -1, 3, 1 << 70, "x", "", [], [1], {}, {"a": 1}, [[]], [[0, 0, 1 << 62]], "\ud800"]

    def change(value: Any, depth: int = 0) -> None:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = save.chance.choice(places)
        if isinstance(value[place], (dict, list)) and save.chance.random() < 0.7:
            change(value[place], depth + 1)
        elif save.chance.random() < 0.25:
            del value[place]
        else:
            value[place] = save.chance.choice(odd)

    save.notes(change)


DAMAGE = [flip, flip, flip, flip, cut_short, longer, blank, moved, swapped, gone, long_header, other_version, metadata]
DAMAGE += [entries, entries, forged, forged]


def judged(is_equal: Callable[[], bool], folder: Path) -> str:
    try:
        return "equal" if is_equal() else "different"
    except pl.PacelineError as error:
        # What a call of the script does not fit is said at that call, where no file is at hand.
        fine = (str(folder) in str(error) or "the checkpoint was made with" in str(error)) and "\n" not in str(error)
        return "refused" if fine else f"not named: {error}"
    except BaseException:
        return traceback.format_exc()


def main(count: int, seed: int) -> None:
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as made:
        original = Path(made, "original")
        original.mkdir()
        expected = outcome(saved(original))
        assert outcome(original / "model.safetensors") == expected
        models = [model_of(original / name) for name in ("model.safetensors", "model.previous.safetensors")]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        folder, path = Path(made, "damaged"), Path(made, "damaged", "model.safetensors")
        told: dict[str, dict[str, int]] = {}
        wrong: list[str] = []
        for number in range(count):
            shutil.copytree(original, folder)
            damage = DAMAGE[number % len(DAMAGE)]
            damage(Save(folder, random.Random(seed * 1_000_003 + number)))
            began = time.monotonic()
            kind = judged(lambda: outcome(path) == expected, folder)
            alone = judged(lambda: model_of(path) in models, folder)
            kind = kind if alone in ("equal", "refused") else f"the model alone: {alone}"
            if time.monotonic() - began > MOST_SECONDS:
                kind = "slow"
            # Whoever has the checksum agree has made another save: that may come to something else.
            fine = ("equal", "refused", "different") if damage is forged else ("equal", "refused")
            if kind not in fine:
                wrong.append(f"{damage.__name__} {number}: {kind}")
            counts = told.setdefault(damage.__name__, {})
            counts[kind[:20]] = counts.get(kind[:20], 0) + 1
            shutil.rmtree(folder)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"counts": told, "wrong": wrong, "grown": grown}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
