"""A training run over several hosts to kill: in float64, so that it is equal to one process or is not.

`--kill '[["server 1", 3]]'`: before its fourth step replica 0 kills that process, once. A process is a `server`, a
`replica` or the `supervisor` of a host. `--never 1`: replica 1 ends before it has come to the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.run_place import find_place

BATCH = 12
SAMPLES = 48


def pid_of(name: str) -> int:
    """The process that was started last by that name, on whatever host."""
    kind, number = name.split()
    found = []
    for path in Path("run").rglob("events.jsonl"):
        for event in map(json.loads, path.read_text().splitlines()):
            if kind == "server" and event["event"] == "server started" and event["server"] == int(number):
                found.append((event["time"], event["pid"]))
            if kind != "server" and event["event"] in ("started", "restarted") and event["replica"] == int(number):
                found.append((event["time"], event["pid"]))
    pid = int(max(found)[1])
    # With one replica a host, a supervisor has the number of its replica.
    return psutil.Process(pid).ppid() if kind == "supervisor" else pid


def kill(name: str) -> None:
    """Kill it, and see that it is gone: of a replica or server, that another one is there."""
    pid = pid_of(name)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=json.loads, default=[])
    parser.add_argument("--never", type=int, default=-1)
    options = parser.parse_args()
    place = find_place()
    if place.rank == options.never:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(8, 4, generator=generator, dtype=torch.float64)).argmax(1)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    trainer = pl.Trainer(model, optimizer, loss)
    for batch in trainer.batches((x, y), BATCH, epochs=3, seed=5):
        for number, (name, step) in enumerate(options.kill):
            mark = Path(f"kill-{number}")
            if place.rank == 0 and trainer.steps >= step and not mark.exists():
                mark.touch()
                kill(name)
        trainer.step(batch)
    evaluated = trainer.evaluate((x, y), loss, batch_size=8)
    weights = [float(parameter.detach().sum()) for parameter in model.parameters()]
    print(json.dumps({"evaluated": evaluated, "weights": weights}))
    print(json.dumps({"ledger": trainer.ledger.check(), "steps": trainer.steps}))


if __name__ == "__main__":
    main()
