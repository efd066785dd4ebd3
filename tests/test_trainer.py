"""`pl.Trainer` as a user meets it: what it computes with one replica and with two, and what it says when it cannot.

Much of it needs real replicas, whose start takes longer than anything they do here: so many small cases share a script,
`trainer_cases.py`, which tells what each came to, and the tests look at that.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TESTS, Run, Start
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from trainer_cases import (
    CASES,
    REFUSALS,
    X,
    dropout_draws_the_same_for_the_same_seed,
    losses,
    new_trainer,
    square,
)

import paceline as pl

# ── refused, in one sentence ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (lambda loss: loss.item(), "loss is 'float': return a scalar tensor (at step 2 on replica 0)"),
        (lambda loss: None, "loss is 'NoneType': return a scalar tensor (at step 2 on replica 0)"),
        (
            lambda loss: loss.expand(3),
            "loss is 'a tensor of shape (3,)': return its mean, a scalar (at step 2 on replica 0)",
        ),
        (lambda loss: loss * float("nan"), "loss is nan: it must be finite (at step 2 on replica 0); lower the"),
        (lambda loss: loss / 0, "loss is inf: it must be finite (at step 2 on replica 0); lower the"),
    ],
    ids=["a number", "nothing", "one a sample", "NaN", "infinite"],
)
def test_a_loss_that_cannot_be_trained_on_is_named_with_its_step(
    result: Callable[[torch.Tensor], Any], sentence: str
) -> None:
    trainer: pl.Trainer = new_trainer(
        lambda model, x: (result if trainer.steps == 2 else torch.clone)(square(model, x))
    )
    with pytest.raises(pl.PacelineError) as refusal:
        losses(trainer)
    assert str(refusal.value).startswith(sentence)
    assert trainer.steps == 2


class Growing:
    """A dataset somebody adds to while it is being trained on."""

    def __init__(self) -> None:
        self.rows = list(X)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def test_a_dataset_that_changes_its_length_is_noticed() -> None:
    dataset = Growing()

    def grow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        dataset.rows.append(X[0])
        return square(model, x)

    with pytest.raises(pl.PacelineError, match="it was 26 when training began, and must not change while it lasts"):
        losses(new_trainer(grow), dataset)


def test_a_batch_from_elsewhere_is_refused() -> None:
    trainer = new_trainer()
    with pytest.raises(pl.PacelineError, match=r"a batch that trainer\.batches did not yield just now"):
        trainer.step(X[:8])
    for batch in trainer.batches(X, 8):
        trainer.step(batch)
        with pytest.raises(pl.PacelineError, match=r"a batch that trainer\.batches did not yield just now"):
            trainer.step(batch)


def test_a_ledger_is_asked_for_before_there_is_one() -> None:
    with pytest.raises(pl.PacelineError, match=r"begins with the first call of trainer\.batches"):
        _ = new_trainer().ledger


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clip_norm": 0.0}, "clip_norm is 0.0: give a number above 0, or None"),
        ({"accumulate": 0}, "accumulate is 0: give a whole number of passes from 1 up"),
        ({"strategy": pl.Mirrored(replicas=2)}, "replicas is 2: this is one process, start it with `paceline run "),
    ],
    ids=["clip_norm", "accumulate", "strategy"],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(pl.PacelineError) as refusal:
        new_trainer(**options)
    assert str(refusal.value).startswith(sentence)


def test_a_scheduler_that_waits_for_a_metric_is_the_users_own_to_step() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(pl.PacelineError, match=r"ReduceLROnPlateau.*step it yourself with your metric"):
        new_trainer(scheduler=ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0: give"),
        ({"batch_size": 8, "epochs": -1}, "epochs is -1: give a whole number from 0 up"),
        ({"batch_size": 27, "drop_last": True}, "batch_size is 27: with drop_last give at most the 26 samples"),
    ],
    ids=["batch_size", "epochs", "drop_last"],
)
def test_batches_that_cannot_be_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(pl.PacelineError) as refusal:
        next(new_trainer().batches(X, **arguments))
    assert str(refusal.value).startswith(sentence)


def test_a_stream_has_no_end_to_evaluate_to() -> None:
    with pytest.raises(pl.PacelineError, match="dataset is 'generator': evaluate on one that has a length"):
        new_trainer().evaluate((x for x in X), square)


# ── the same numbers with one replica and with two ───────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def two_replicas(start: Start) -> Run:
    """All of `trainer_cases.py`, in one launch."""
    return start(TESTS / "trainer_cases.py", "--replicas 2 --timeout 30").fine()


def assert_equal_to_rounding(found: Any, expected: Any) -> None:
    """Whatever is made of lists, dictionaries and numbers."""
    if isinstance(expected, (list, dict)):
        assert len(found) == len(expected)
        for key in range(len(expected)) if isinstance(expected, list) else expected:
            assert_equal_to_rounding(found[key], expected[key])
    else:
        assert found == (pytest.approx(expected, rel=1e-4, abs=1e-7) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_come_to_what_one_process_comes_to(case: str, two_replicas: Run) -> None:
    assert_equal_to_rounding(two_replicas.told(case), CASES[case]())
    assert two_replicas.told(case, replica=1) == two_replicas.told(case)


def test_passes_do_not_change_the_losses() -> None:
    one, three = (losses(new_trainer(accumulate=passes), batch_size=10) for passes in (1, 3))
    assert three == pytest.approx(one, rel=1e-5)


def test_dropout_is_reproducible_whatever_the_script_draws_itself() -> None:
    assert dropout_draws_the_same_for_the_same_seed() == {"same seed": True, "other seed": False, "none": False}


# ── refused by two replicas ──────────────────────────────────────────────────────────────────────────────────

SENTENCES = {
    "fewer_samples_a_batch_than_replicas": "batch_size is 1: give at least one sample for each of the 2 replicas",
    "too_many_metrics": "1025 numbers were to be summed at once: at most 1024 can be",
    "another_learning_rate_in_one_replica": (
        "optimizer is 'the options of replica {me}': they differ from those of replica {other} (learning rate,"
    ),
    "a_loss_that_is_not_a_number_any_more": "loss is nan: it must be finite (at step 3 on replica {me})",
    "a_loss_a_sample": "loss is 'a tensor of shape (2, 1)': return its mean, a scalar (at step 0 on replica {me})",
    "a_batch_that_is_never_trained_on": "the batch of update 0 was drawn and never trained on: give every batch to",
    "a_strategy_of_other_size": "replicas is 3: this run was started with 2, start it with --replicas 3",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_replica_is_told_what_is_wrong(case: str, two_replicas: Run) -> None:
    for me, other in ((0, 1), (1, 0)):
        assert two_replicas.told(case, me).startswith(SENTENCES[case].format(me=me, other=other))


BEGINNING = """
import os, signal, torch, paceline as pl
from torch import nn

def square(model, x):
    return model(x).square().mean()

rank = pl.place().rank
torch.manual_seed(0)
x = torch.randn(24, 4)
"""
FAILING = {
    "NaN in one replica": (
        """
model = nn.Linear(4, 1)
x[10] = float("nan")
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
for batch in trainer.batches(x, 4, shuffle=False):
    trainer.step(batch)
""",
        "loss is nan: it must be finite (at step 2 on replica 1); lower the learning rate or look at the data",
    ),
    "another seed in each replica": (
        """
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
""",
        "at the start; set the same seed in every process before the model is made",
    ),
    "another shape in each replica": (
        """
model = nn.Linear(4, 1 + rank)
pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
""",
        "model is 'bias': replica 1 has it as [[2], 'torch.float32'] and replica 0 has 'bias' as [[1], "
        "'torch.float32']; build the same model and optimizer in every process",
    ),
    "one evaluates while the other steps": (
        """
model = nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
for batch in trainer.batches(x, 4):
    if rank == 1 and trainer.steps == 3:
        trainer.evaluate(x, square)
    trainer.step(batch)
""",
        "every replica must make the same trainer calls in the same order",
    ),
    "a batch that was changed cannot be computed again for a dead replica": (
        """
model = nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
for batch in trainer.batches(x, 4):
    if rank == 1 and trainer.steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step(batch * 2)
""",
        "a replica died and its samples cannot be computed again, because the batch given to trainer.step is not the "
        "one that trainer.batches yielded: transform it in the dataset or in the loss",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_only_some_replicas_notice_ends_the_run_at_once_with_one_sentence(case: str, start: Start) -> None:
    text, sentence = FAILING[case]
    run = start(BEGINNING + text, "--replicas 2").end()
    assert run.code == 1
    assert sentence in run.sentence
    assert run.seconds < 30  # not after the 600 s that a wait may take
    run.assert_nothing_left()


# ── interrupted, and resumed ─────────────────────────────────────────────────────────────────────────────────

STEPS, SAVE_EVERY, INTERRUPT_AT = 45, 7, 17

RESUMABLE = f"""
import json, sys, time, torch, paceline as pl
from pathlib import Path
from torch import nn

torch.manual_seed(0)
x = torch.randn(60, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
trainer = pl.Trainer(model, optimizer, lambda m, x: m(x).square().mean(), scheduler=scheduler)
path, slowly = Path(sys.argv[1]), "slowly" in sys.argv
trainer.resume(path)
losses = {{}}
for batch in trainer.batches(x, 4, epochs=3, seed=2):
    number = trainer.steps
    losses[number] = trainer.step(batch)
    if "saving" in sys.argv and trainer.steps % {SAVE_EVERY} == 0:
        trainer.save(path)
    if trainer.steps == {INTERRUPT_AT}:
        Path("reached").touch()
    if slowly and trainer.steps >= {INTERRUPT_AT}:
        time.sleep(0.1)
print(json.dumps({{"losses": losses, "ledger": trainer.ledger.check()}}))
"""


@pytest.fixture(scope="module")
def uninterrupted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(RESUMABLE, "--replicas 2", str(tmp_path_factory.mktemp("none") / "last.safetensors")).fine()


def await_file(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_goes_on(start: Start, path: Path, uninterrupted: Run, first: range) -> None:
    """Whoever resumes from `path` begins with one of the updates `first`, and has the losses of the other run."""
    resumed = start(RESUMABLE, "--replicas 2", str(path)).fine()
    expected, found = uninterrupted.told("losses"), resumed.told("losses")
    begins = min(map(int, found))
    assert begins in first
    assert found == {number: loss for number, loss in expected.items() if int(number) >= begins}
    assert resumed.told("ledger") == uninterrupted.told("ledger") == "epochs 0 to 2: 60 samples, each once"


def test_ctrl_c_saves_and_the_run_goes_on_from_there(start: Start, uninterrupted: Run, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    run = start(RESUMABLE, f"--replicas 2 --save-on-stop {path}", f"{path} slowly")
    await_file(run.folder / "reached")
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130
    run.assert_nothing_left()
    assert_goes_on(start, path, uninterrupted, first=range(INTERRUPT_AT, STEPS))


def test_kill_of_the_whole_run_goes_on_from_the_last_save(start: Start, uninterrupted: Run, tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    run = start(RESUMABLE, "--replicas 2", f"{path} slowly saving")
    await_file(run.folder / "reached")
    run.process.kill()
    assert run.end().code == -signal.SIGKILL
    run.assert_nothing_left()
    assert_goes_on(start, path, uninterrupted, first=range(14, STEPS, SAVE_EVERY))


def test_a_metric_of_other_names_in_another_batch_is_refused() -> None:
    model = nn.Linear(2, 1)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
    samples = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])

    def by_class(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"class {int(batch[0, 0])}": model(batch).mean()}

    with pytest.raises(pl.PacelineError, match="metric is 'class 1': of the batch before it was class 0"):
        trainer.evaluate(samples, by_class, batch_size=2)
