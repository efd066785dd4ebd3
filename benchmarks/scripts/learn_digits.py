"""Digits until they are known: paceline run learn_digits.py --replicas 4 --emulate hosts=4,link=1gbit

Writes after how many steps the test accuracy was reached, after how long, and how many bytes this host had sent by
then. Data, loss and accuracy are those of examples/digits.py.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import digits


def sent_bytes() -> int:
    """Returns what has left this host, whose network is a namespace of its own, over its link."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
    return sum(int(numbers[8]) for name, numbers in counts.items() if name != "lo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--epochs", type=int, default=40, help="at most")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    width = options.width
    model = nn.Sequential(nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
    trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), digits.loss)
    train_set, test_set = digits.digits()
    before, began, reached = sent_bytes(), time.monotonic(), False
    for _ in range(options.epochs):
        for batch in trainer.batches(train_set, options.batch_size, seed=options.seed):
            trainer.step(batch)
        if reached := trainer.evaluate(test_set, digits.accuracy) >= options.accuracy:
            break
    if trainer.chief:
        seconds = time.monotonic() - began
        found = {"steps": trainer.steps, "bytes": sent_bytes() - before, "seconds": seconds, "reached": reached}
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
