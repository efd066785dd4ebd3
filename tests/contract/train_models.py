"""Trains every model of the contract, one after another, under whatever strategy the process was started with.

Every replica prints the losses, and a checksum of what it holds in the end. With `--record FOLDER` every tensor of
every step is written down, as `paceline verify` has it, in a folder a model; with `--save FOLDER` there is a checkpoint
of each after two updates; with `--resume FOLDER` training goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import msgspec
import torch
from checksum import checksum
from models import MODELS, Case

import paceline as pl
from paceline.run_place import PLACE_VARIABLE, Place, Recording, find_place

EPOCHS = 2
SAVE_AFTER = 2  # updates
ALL_STEPS = 1000


def train(name: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    case = MODELS[name]()
    trainer = pl.Trainer(
        case.model,
        case.optimizer,
        case.loss,
        scheduler=case.scheduler,
        clip_norm=case.clip_norm,
        accumulate=options.accumulate,
    )
    if options.resume:
        assert trainer.resume(options.resume / f"{name}.safetensors")
    losses: dict[int, float] = {}
    logged: dict[int, dict[str, float]] = {}
    data = case.data if len(case.data) > 1 else case.data[0]
    predicted = predict_alone(trainer, case)
    for batch in trainer.batches(data, case.batch_size, epochs=EPOCHS, seed=3):
        number = trainer.steps
        losses[number] = trainer.step(batch)
        logged[number] = trainer.logged
        if options.save and trainer.steps == SAVE_AFTER:
            trainer.save(options.save / f"{name}.safetensors")
        if trainer.steps == SAVE_AFTER:
            predicted += predict_alone(trainer, case)
    predicted += predict_alone(trainer, case, everywhere=True)
    # A device of a cut model has parts, which differ from those of the others.
    whole = find_place().strategy.devices == 1
    told = {"losses": losses, "checksum": checksum(case.model) if whole else None, "ledger": trainer.ledger.check()}
    told["logged"] = logged
    print(json.dumps({name: told}))
    print(json.dumps({f"{name} predicts": predicted}))
    trainer.close()


def predict_alone(trainer: pl.Trainer, case: Case, *, everywhere: bool = False) -> list[list[float]]:
    """What the chief is answered, or the last process, or all of them; the others go on."""
    place, before = find_place(), [module.training for module in case.model.modules()]
    found = []
    if everywhere or trainer.chief or place.rank == place.world - 1:
        answer = trainer.predict(case.asked[:3] if case.asked is not None else case.data[0][:3])
        assert not answer.requires_grad
        found.append(answer.flatten().tolist())
    assert [module.training for module in case.model.modules()] == before
    return found


def record_into(folder: Path, place: Place) -> None:
    """What `paceline verify` tells its processes by their place, said anew for each model."""
    folder.mkdir(parents=True, exist_ok=True)
    place = msgspec.structs.replace(place, recording=Recording(str(folder), ALL_STEPS))
    os.environ[PLACE_VARIABLE] = msgspec.json.encode(place).decode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    place = find_place()
    for name in options.models.split(","):
        if options.record:
            record_into(options.record / name, place)
        train(name, options)


if __name__ == "__main__":
    main()
