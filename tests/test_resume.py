"""A script that is run again from its first line goes on where its checkpoint was saved, as if never interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

import paceline as pl

GENERATOR = torch.Generator().manual_seed(1)
DATA = (torch.randn(40, 6, generator=GENERATOR), torch.randint(3, (40,), generator=GENERATOR))
OTHER_DATA = (DATA[0][:16], DATA[1][:16])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def new_trainer(schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None) -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return pl.Trainer(model, optimizer, loss, scheduler=schedule(optimizer) if schedule else None)


class Told:
    """What a run gave: losses and learning rates by update, evaluations in order."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.evaluations: list[float] = []

    def step(self, trainer: pl.Trainer, batch: Any) -> None:
        number = trainer.steps
        self.losses[number] = trainer.step(batch)
        self.rates[number] = trainer.optimizer.param_groups[0]["lr"]

    def __sub__(self, steps: int) -> dict[int, tuple[float, float]]:
        """Losses and rates from update number `steps` on."""
        return {n: (value, self.rates[n]) for n, value in self.losses.items() if n >= steps}


def epochs(trainer: pl.Trainer, save_at: int | None = None, path: Path | None = None) -> Told:
    """Three epochs of five updates with an evaluation after each; a save after update `save_at`."""
    told = Told()
    for _ in range(3):
        for batch in trainer.batches(DATA, 8, seed=4):
            told.step(trainer, batch)
            if trainer.steps == save_at and path is not None:
                trainer.save(path)
        told.evaluations.append(trainer.evaluate(DATA, loss, batch_size=16))
    return told


@pytest.mark.parametrize("save_at", [1, 4, 5, 7, 10, 14, 15])
def test_losses_and_evaluations_are_those_of_the_uninterrupted_run(save_at: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    uninterrupted = epochs(new_trainer(), save_at, path)
    again = new_trainer()
    assert again.resume(path)
    resumed = epochs(again)
    assert resumed - 0 == uninterrupted - save_at
    assert resumed.evaluations == uninterrupted.evaluations
    assert again.steps == 15
    assert again.ledger.check() == "epochs 0 to 2: 40 samples, each once"


def chapters(trainer: pl.Trainer, save_at: int | None = None, path: Path | None = None) -> Told:
    """Five updates on one dataset, then four on another, with an evaluation after each."""
    told = Told()
    for data, count in ((DATA, 1), (OTHER_DATA, 2)):
        for batch in trainer.batches(data, 8, epochs=count, seed=4):
            told.step(trainer, batch)
            if trainer.steps == save_at and path is not None:
                trainer.save(path)
        told.evaluations.append(trainer.evaluate(DATA, loss, batch_size=16))
    return told


@pytest.mark.parametrize("save_at", [3, 5, 6, 7, 8])
def test_a_script_with_two_datasets_finds_its_place_in_the_second(save_at: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    uninterrupted = chapters(new_trainer(), save_at, path)
    again = new_trainer()
    assert again.resume(path)
    resumed = chapters(again)
    assert resumed - 0 == uninterrupted - save_at
    assert resumed.evaluations == uninterrupted.evaluations
    assert again.steps == 9


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [2, 5, 9, 12], gamma=0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [ExponentialLR(optimizer, 0.9), MultiStepLR(optimizer, [2, 4])], milestones=[6]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    uninterrupted = epochs(new_trainer(SCHEDULES[name]), 7, path)
    again = new_trainer(SCHEDULES[name])
    assert again.resume(path)
    assert epochs(again) - 0 == uninterrupted - 7


def test_saving_where_the_script_has_yet_to_reach_its_position_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    epochs(new_trainer(), 12, path)
    again = new_trainer()
    assert again.resume(path)
    assert again.steps == 12, "the run's, of which the script knows nothing yet"
    before = path.read_bytes()
    again.save(path)
    for _ in again.batches(DATA, 8, seed=4):
        raise AssertionError("epoch 0 lies behind")
    again.save(path)
    assert path.read_bytes() == before


def test_a_larger_batch_leaves_out_what_is_too_small_for_it_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    path, trainer = tmp_path / "model.safetensors", new_trainer()
    for batch in trainer.batches(DATA, 12, seed=4, drop_last=True):
        trainer.step(batch)
        if trainer.steps == 2:
            break
    for batch in trainer.batches(DATA, 20, seed=4, drop_last=True):  # of 40, 16 are left
        trainer.step(batch)
    assert trainer.ledger is not None
    assert "each once" in trainer.ledger.check()
    trainer.save(path)
    again = new_trainer()
    assert again.resume(path)
    assert again.steps == trainer.steps


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    trainer = new_trainer()
    assert not trainer.resume(tmp_path / "none.safetensors")
    assert len(epochs(trainer).losses) == 15


def test_resuming_after_the_first_batch_is_refused(tmp_path: Path) -> None:
    trainer = new_trainer()
    path = tmp_path / "model.safetensors"
    epochs(trainer, 3, path)
    with pytest.raises(pl.PacelineError, match=r"comes too late: call it before trainer\.batches"):
        trainer.resume(path)


def test_what_a_script_draws_on_its_way_to_its_position_is_what_it_drew_before(tmp_path: Path) -> None:
    """A split of the dataset, say: with other random numbers, samples to test on would become samples to train on."""
    path = tmp_path / "model.safetensors"

    def split_and_train(save_at: int | None) -> tuple[list[Any], dict[int, float]]:
        trainer = new_trainer()
        trainer.resume(path)
        chosen, told = torch.randperm(40)[:32], Told()
        drawn: list[Any] = chosen.tolist()
        for _ in range(3):
            drawn.append(torch.rand(1).item())
            for batch in trainer.batches((DATA[0][chosen], DATA[1][chosen]), 8, seed=4):
                told.step(trainer, batch)
                if trainer.steps == save_at:
                    trainer.save(path)
        return [*drawn, torch.rand(1).item()], told.losses

    drawn, uninterrupted = split_and_train(save_at=9)
    assert split_and_train(save_at=None) == (drawn, {n: uninterrupted[n] for n in range(9, 12)})
