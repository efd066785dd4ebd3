"""A published model, as its library makes it, with random weights: one core by plain torch, or under Paceline.

python benchmarks/scripts/published.py gpt2 --plain
paceline run benchmarks/scripts/published.py --stages 2 --micro-batches 8 -- gpt2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from stopwatch import Stopwatch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "zoo"))

from torchvision_operators import stand_in

Made = tuple[nn.Module, Any, tuple[torch.Tensor, ...]]


def gpt2(options: argparse.Namespace) -> Made:
    """GPT-2 of 8 blocks, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 16, "n_head": 2} if options.tiny else {}
    config = GPT2Config(n_layer=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    words = torch.randint(config.vocab_size, (options.steps * options.batch_size, 8 if options.tiny else 128))
    return GPT2LMHeadModel(config), lambda model, batch: model(batch[0], labels=batch[0]).loss, (words,)


def resnet18(options: argparse.Namespace) -> Made:
    """resnet18 on images of 224×224."""
    from torchvision.models import resnet18

    count, side = options.steps * options.batch_size, 64 if options.tiny else 224
    images, kinds = torch.randn(count, 3, side, side), torch.randint(1000, (count,))
    return resnet18(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), (images, kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt2", "resnet18"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="plain torch, without Paceline")
    parser.add_argument("--tiny", action="store_true", help="a small configuration: does it run at all?")
    parser.add_argument("--times", type=Path, help="write down when each step ended; the first line is the beginning")
    options = parser.parse_args()
    stand_in()
    torch.manual_seed(0)
    model, loss, data = {"gpt2": gpt2, "resnet18": resnet18}[options.model](options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if options.plain:
        watch = Stopwatch(options.times)
        watch.step()
        for rows in torch.arange(len(data[0])).split(options.batch_size):
            optimizer.zero_grad()
            loss(model, tuple(part[rows] for part in data)).backward()
            optimizer.step()
            watch.step()
        return
    import paceline as pl

    trainer = pl.Trainer(model, optimizer, loss)
    watch = Stopwatch(options.times if trainer.chief else None)
    watch.step()
    for batch in trainer.batches(data, options.batch_size):
        trainer.step(batch)
        watch.step()


if __name__ == "__main__":
    main()
