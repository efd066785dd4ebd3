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
from typing import Any

import msgspec
import torch
from checksum import checksum
from models import MODELS, Case
from torch import nn

import paceline as pl
import paceline.central.replica.opening as replica_opening
import paceline.mirrored.opening as mirrored_opening
from paceline.run_place import PLACE_VARIABLE, Place, Recording, find_place

EPOCHS = 2
SAVE_AFTER = 2  # updates
ALL_STEPS = 1000
AS_IF = "as-if"  # it were a device: the model stays on the CPU, and everybody takes that for an accelerator


def train(name: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    case = MODELS[name]()
    trainer = pl.Trainer(
        case.model if options.device is None else moved(case, options.device),
        case.optimizer,
        case.loss if options.device is None else lambda model, batch: case.loss(model, on(options.device, batch)),
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
        asked = case.asked[:3] if case.asked is not None else case.data[0][:3]
        answer = trainer.predict(on(next(case.model.parameters()).device, asked))
        assert not answer.requires_grad
        found.append(answer.flatten().tolist())
    assert [module.training for module in case.model.modules()] == before
    return found


def moved(case: Case, device: str) -> nn.Module:
    """The model on that device. Some have other parameters there, of which the optimizer is told."""
    before = list(case.model.parameters())
    if device == AS_IF:
        for opening in (mirrored_opening, replica_opening):
            opening.device_of = lambda model: torch.device("xla:0")  # type: ignore[attr-defined]
    else:
        if device.startswith("xla"):
            import torch_xla  # noqa: F401, which makes the device known to torch
        case.model.to(device)
    there = dict(zip(before, case.model.parameters(), strict=True))
    for group in case.optimizer.param_groups:
        group["params"] = [there[parameter] for parameter in group["params"]]
    return case.model


def on(device: str | torch.device, batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch if device == AS_IF else batch.to(device)
    return type(batch)(on(device, part) for part in batch) if isinstance(batch, tuple | list) else batch


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
    parser.add_argument("--device", help="that the models are on")
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    place = find_place()
    for name in options.models.split(","):
        if options.record:
            record_into(options.record / name, place)
        train(name, options)


if __name__ == "__main__":
    main()
