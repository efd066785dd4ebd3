"""Trains an architecture of the zoo for a few steps, in float64.

python benchmarks/zoo/train.py gpt2                                     # one process
paceline run benchmarks/zoo/train.py --replicas 2 -- gpt2 --no-dropout  # the same numbers
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import torch
from case import BATCH, all_in_double, without_dropout
from models import MODELS
from torchvision_operators import stand_in

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--no-dropout", action="store_true", help="replicas draw other masks than one process does")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="passes a batch")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the model and the losses are written")
    options = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    if MODELS[options.model].made_by:
        stand_in()
    torch.manual_seed(0)
    case = getattr(importlib.import_module(MODELS[options.model].file), options.model)()
    all_in_double(case.model)
    if options.no_dropout:
        without_dropout(case.model)

    trainer = pl.Trainer(case.model, case.optimizer, case.loss, accumulate=options.accumulate)
    losses = {}
    for batch in trainer.batches(case.data, BATCH, seed=0):
        loss = trainer.step(batch)
        losses[trainer.steps] = loss
        print(f"step {trainer.steps}: loss {loss:.12f}")
    if options.out is not None:
        trainer.save(options.out / "model.safetensors")
        path = options.out / f"losses-{trainer.replica}-{trainer.device}.json"
        path.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
