"""What one process that is all replicas comes to, for `test_in_graph.py`; several trainings in one launch."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from async_cases import told
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import paceline as pl
from paceline.loop.batch import MicroBatches, ReplicaBatches
from paceline.rules import Async, Rule, Sync

sys.path.append(str(Path(__file__).parents[2] / "examples"))

LEFT = 7  # exit code
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(6))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def new_trainer(loss: Any = square, rule: Rule | None = None, lr: float = 0.05, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), loss, **options)
    if rule is not None:
        trainer.rule = rule
    return trainer


def me() -> int:
    """Which replica this thread is."""
    return int(threading.current_thread().name.removeprefix("paceline-replica-"))


def failure_of(act: Callable[[], Any]) -> list[str]:
    """How an act fails: the sentence, and the functions of its traceback."""
    try:
        act()
    except Exception as error:
        return [str(error), *(frame.name for frame in traceback.extract_tb(error.__traceback__))]
    return []


def losses(trainer: pl.Trainer, data: torch.Tensor = X, batch_size: int = 12, **options: Any) -> list[float]:
    return [trainer.step(batch) for batch in trainer.batches(data, batch_size, **options)]


# ── what it is like ──────────────────────────────────────────────────────────────────────────────────────────


def a_loop() -> dict[str, Any]:
    threads: set[tuple[int, int, int]] = set()

    def watched(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        here, forward = me(), torch.get_num_threads()
        out = model(x)
        out.register_hook(lambda _: threads.add((here, forward, torch.get_num_threads())))
        assert me() == here
        return out.square().mean()  # type: ignore[no-any-return]

    trainer = new_trainer(watched)
    kinds, sizes, steps = set(), [], []
    for batch in trainer.batches(X[:38], 12):
        kinds.add(type(batch).__name__)
        sizes.append([len(part) for part in batch] if isinstance(batch, ReplicaBatches) else len(batch))
        trainer.step(batch)
        steps.append(trainer.steps)
    told_now = told(trainer, sizes=sizes, seen_steps=steps, threads=sorted(threads), kinds=sorted(kinds))
    told_now |= {"replicas": trainer.replicas, "replica": trainer.replica, "chief": trainer.chief}
    trainer.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-replica")]
    return {**told_now, "threads_left": left, "main_threads": torch.get_num_threads()}


def schedules() -> list[float]:
    """The user's optimizer, and its schedule, is that of all replicas."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}], lr=0.2)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = pl.Trainer(model, optimizer, square, scheduler=scheduler, accumulate=2, clip_norm=5.0)
    found = []
    for batch in trainer.batches(X, 12):
        for part in batch if isinstance(batch, ReplicaBatches) else [batch]:
            assert isinstance(part, MicroBatches)
        found.append(trainer.step(batch))
    return [*found, *(group["lr"] for group in optimizer.param_groups), *model.weight.flatten().tolist()]


def changed_batches() -> list[float]:
    trainer = new_trainer()

    def twice(batch: Any) -> Any:
        return [part * 2 for part in batch] if isinstance(batch, ReplicaBatches) else batch * 2

    return [trainer.step(twice(batch)) for batch in trainer.batches(X, 12)]


def a_break() -> dict[str, Any]:
    """A batch that was drawn and not used is used later."""
    trainer = new_trainer()
    for batch in trainer.batches(X, 12):
        trainer.step(batch)
        if trainer.steps == 2:
            break
    for _ in trainer.batches(X[:40], 10, epochs=1):
        break
    losses(trainer, X[:30], 10)
    return told(trainer)


def going_on() -> list[float]:
    """Evaluation, a checkpoint, and another trainer that goes on from it."""
    trainer = new_trainer()
    first = losses(trainer)
    mean = trainer.evaluate(X[:31], square, batch_size=7)
    trainer.save("saved.safetensors")
    with torch.no_grad():
        by_hand = square(trainer.model, X[:31]).item()
    other = new_trainer()
    assert other.resume("saved.safetensors")
    return [*first, mean, by_hand, *losses(other, epochs=2)]


def freezing() -> list[float]:
    """A layer that is frozen in mid-training, and another that is not any more."""
    trainer = new_trainer()
    first, _, last = trainer.model  # type: ignore[misc]
    last.bias.requires_grad_(False)
    for batch in trainer.batches(X, 12):
        trainer.step(batch)
        if trainer.steps == 2:
            first.requires_grad_(False)
            last.bias.requires_grad_(True)
    return [value for parameter in trainer.model.parameters() for value in parameter.flatten().tolist()]


def statistics_in_the_loop() -> list[float]:
    """Running means as the script sees them after a step, and as it saves them there."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 1))
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), square)
    found: list[float] = []
    for batch in trainer.batches(X + 5.0, 12):
        trainer.step(batch)
        assert norm.running_mean is not None
        found += norm.running_mean.tolist()
    trainer.save("in_the_loop.safetensors")
    return [*found, *load_file("in_the_loop.safetensors")["0.running_mean"].tolist()]


def resumed_statistics() -> list[list[float]]:
    """Running means when they are saved, and when another trainer has been given its first batch."""
    found = []
    for epochs in (1, 2):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        model = nn.Sequential(norm, nn.Linear(4, 1))
        trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), square)
        trainer.resume("statistics.safetensors")
        assert norm.running_mean is not None
        for batch in trainer.batches(X + 5.0, 12, epochs=epochs):
            if epochs == 2:
                break
            trainer.step(batch)
        else:
            trainer.save("statistics.safetensors")
        found.append(norm.running_mean.tolist())
    return found


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────


def a_slow_replica() -> dict[str, Any]:
    """Replica 2 is slow, and not waited for; it works on in the background."""
    times = [0, 0, 0]

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        times[me()] += 1
        time.sleep(0.3 if me() == 2 else 0.005)
        return square(model, x)

    trainer = new_trainer(slow, Sync(2))
    rounds = len(losses(trainer, batch_size=2))
    return told(trainer, times=times, rounds=rounds)


def a_slow_first_replica() -> dict[str, Any]:
    """The replica whose model is the user's is the slow one: the user sees what is current all the same."""

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1 if me() == 0 else 0.005)
        return square(model, x)

    trainer = new_trainer(slow, Sync(2))
    values = []
    for batch in trainer.batches(X, 4):
        trainer.step(batch)
        values.append(trainer.model[0].weight.sum().item())  # type: ignore[index, union-attr]
    mean = trainer.evaluate(X, square)
    trainer.save("slow.safetensors")
    return told(trainer, values=values, mean=mean, by_hand=square(trainer.model, X).item())


def unhurried(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Takes so long that replicas are at it at the same time, on any machine."""
    time.sleep(0.01)
    return square(model, x)


def asynchronous(rule: Rule) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        trainer = new_trainer(unhurried, rule)
        found = losses(trainer, batch_size=2, epochs=2)
        return told(trainer, losses=found, mean=trainer.evaluate(X, square), by_hand=square(trainer.model, X).item())

    return case


def changing_rules() -> dict[str, Any]:
    trainer = new_trainer(unhurried, Sync())
    for batch in trainer.batches(X, 6, epochs=3):
        trainer.step(batch)
        trainer.rule = Async(stale="compensate") if 5 <= trainer.steps < 15 else Sync()
    return told(trainer, mean=trainer.evaluate(X, square), by_hand=square(trainer.model, X).item())


def digits() -> dict[str, Any]:
    """The example, under two rules; also between processes."""
    import digits as example  # type: ignore[import-not-found]

    train_set, test_set = example.digits()
    found = {}
    for name, rule in (("sync", Sync()), ("async", Async(stale="scale"))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=2e-3), example.loss)
        trainer.rule = rule
        for batch in trainer.batches(train_set, 100, epochs=15, seed=0):
            trainer.step(batch)
        found[name] = trainer.evaluate(test_set, example.accuracy)
        found[f"{name} ledger"] = trainer.ledger.check()
    return found


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────


def a_failing_replica() -> list[str]:
    def breaks(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if me() == 1 and trainer.steps == 2:
            raise ValueError(f"no more of this on replica {me()}")
        return square(model, x)

    trainer = new_trainer(breaks)
    return failure_of(lambda: losses(trainer))


def a_loss_that_does_not_use_its_model() -> list[str]:
    trainer = new_trainer(lambda _, x: square(trainer.model, x))
    return failure_of(lambda: losses(trainer))


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one is enough")


def a_model_that_cannot_be_copied() -> list[str]:
    model = Uncopied(4, 1)
    return failure_of(lambda: pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square))


def too_few_batches() -> list[str]:
    trainer = new_trainer()
    return failure_of(lambda: [trainer.step(batch[:2]) for batch in trainer.batches(X, 12)])


def no_batch() -> list[str]:
    return failure_of(lambda: new_trainer().step(X))


CASES: dict[str, Callable[[], Any]] = {
    "a loop": a_loop,
    "schedules": schedules,
    "changed batches": changed_batches,
    "a break": a_break,
    "going on": going_on,
    "freezing": freezing,
    "statistics in the loop": statistics_in_the_loop,
    "resumed statistics": resumed_statistics,
    "a slow replica": a_slow_replica,
    "a slow first replica": a_slow_first_replica,
    "async": asynchronous(Async()),
    "bounded": asynchronous(Async(bound=0)),
    "drop": asynchronous(Async(stale="drop:0")),
    "changing rules": changing_rules,
    "digits": digits,
    "a failing replica": a_failing_replica,
    "a loss that does not use its model": a_loss_that_does_not_use_its_model,
    "a model that cannot be copied": a_model_that_cannot_be_copied,
    "too few batches": too_few_batches,
    "no batch": no_batch,
}


def leave() -> None:
    """The script ends while a replica is inside torch."""

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        end = time.monotonic() + (1.0 if me() == 2 else 0.0)
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
        return square(model, x)

    trainer = new_trainer(slow, Sync(2))
    for batch in trainer.batches(X, 12, epochs=100):
        trainer.step(batch)
        if trainer.steps == 5:
            sys.exit(LEFT)


def main() -> None:
    for name in sys.argv[1:] or CASES:
        print(json.dumps({name: CASES[name]()}), flush=True)
    if not sys.argv[1:]:
        leave()


if __name__ == "__main__":
    main()
