"""A training run on servers to kill: several chunks a server, momentum, evaluations, saves; nothing random in it.

`--kill '[["server 0", 3, "forward"]]'`: replica 0 kills that process when it is there, once. Every step that a replica
is told of goes into a file of its own, so that a test can see whether any was forgotten.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.central.client.client import Client
from paceline.central.client.initial_values import InitialValues
from paceline.run_place import find_place

BATCH = 12
ANYBODY = ("filling", "filled")  # moments of whichever replica gives the initial values


def pid_of(name: str) -> int:
    """The process that was started last as `server 0` or `replica 1`."""
    if name == "itself":
        return os.getpid()
    kind, number = name.split()
    pids = [os.getpid()]
    for line in Path("run/events.jsonl").read_text().splitlines():
        event = json.loads(line)
        words = ("server started",) if kind == "server" else ("started", "restarted")
        if event["event"] in words and event[kind] == int(number):
            pids.append(event["pid"])
    return int(pids[-1])


def killer(kills: list[tuple[str, int, str]], steps: Callable[[], int]) -> Callable[[str], None]:
    """What the script calls at every moment it has a name for: it may be the last."""

    def reached(moment: str) -> None:
        for number, (names, step, when) in enumerate(kills):
            mark = Path(f"kill-{number}")
            if when == moment and steps() >= step and not mark.exists():  # async steps are not seen one by one
                mark.touch()
                for name in sorted(names.split(","), reverse=True):  # servers first
                    os.kill(pid_of(name), signal.SIGKILL)

    return reached


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=json.loads, default=[])
    parser.add_argument("--samples", type=int, default=5 * BATCH)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--epoch-a-line", type=Path, help="begin an epoch when this file has a line for it")
    options = parser.parse_args()
    place = find_place()
    trainer: pl.Trainer | None = None
    kills = [kill for kill in options.kill if kill[2] in ANYBODY or place.rank == 0]
    reached = killer(kills, lambda: trainer.steps if trainer is not None else 0)
    push = Client.push

    def watched_push(client: Client, *given: object) -> None:
        reached("before push")
        push(client, *given)  # type: ignore[arg-type]
        reached("after push")

    Client.push = watched_push  # type: ignore[method-assign, assignment]
    fill = InitialValues.fill

    def watched_fill(values: InitialValues, *given: object) -> None:
        reached("filling")
        fill(values, *given)  # type: ignore[arg-type]
        reached("filled")

    InitialValues.fill = watched_fill  # type: ignore[method-assign, assignment]
    reached("start")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.samples, 16, generator=generator)
    y = (x @ torch.randn(16, 4, generator=generator)).argmax(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found = F.cross_entropy(model(batch[0]), batch[1])
        if model.training:
            reached("forward")
            time.sleep(options.pause)
        return found

    trainer = pl.Trainer(model, optimizer, loss)
    trainer.resume("last.safetensors")
    evaluations = []
    with Path(f"told-{place.rank}-{os.getpid()}").open("a", buffering=1) as told:
        for epoch in range(options.epochs):
            while options.epoch_a_line and options.epoch_a_line.read_text().count("\n") < epoch:
                time.sleep(0.01)
            for batch in trainer.batches((x, y), BATCH, seed=5):
                trainer.step(batch)
                told.write(f"{trainer.steps}\n")
                reached("between")
            reached("evaluation")
            evaluations.append(trainer.evaluate((x, y), loss, batch_size=8))
            trainer.save("last.safetensors")
    print(json.dumps({"evaluations": evaluations, "ledger": trainer.ledger.check(), "steps": trainer.steps}))


if __name__ == "__main__":
    main()
