"""Trains every model of the contract, one after another, under whatever strategy the process was started with.

With `--record FOLDER` every tensor of the first steps is written down, as `paceline verify` has it, in a folder a
model. At the end of each model every replica prints a checksum of what it holds.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from checksum import checksum
from models import MODELS, Case

import paceline as pl
from paceline.launch.place import PLACE_VARIABLE, Place, Recording, find_place


def train(case: Case, accumulate: int, epochs: int) -> tuple[pl.Trainer, list[float]]:
    trainer = pl.Trainer(
        case.model,
        case.optimizer,
        case.loss,
        scheduler=case.scheduler,
        clip_norm=case.clip_norm,
        accumulate=accumulate,
    )
    losses: list[float] = []
    data = case.data if len(case.data) > 1 else case.data[0]
    with suppress(SystemExit):  # the end of a recording
        for batch in trainer.batches(data, case.batch_size, epochs=epochs, seed=3):
            losses.append(trainer.step(batch))
    return trainer, losses


def record_into(folder: Path, place: Place, steps: int) -> None:
    """What `paceline verify` tells its processes by their place, said anew for each model."""
    folder.mkdir(parents=True, exist_ok=True)
    place = msgspec.structs.replace(place, recording=Recording(str(folder), steps))
    os.environ[PLACE_VARIABLE] = msgspec.json.encode(place).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    place = find_place()
    for name in options.models.split(","):
        torch.manual_seed(0)
        if options.record:
            record_into(options.record / name, place, options.steps)
        case = MODELS[name]()
        trainer, losses = train(case, options.accumulate, epochs=2)
        print(json.dumps({"model": name, "losses": losses, "checksum": checksum(case.model)}))
        trainer.close()


if __name__ == "__main__":
    main()
