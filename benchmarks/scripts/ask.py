"""One plain process asks a predictor, request by request: python benchmarks/scripts/ask.py wide --devices 2"""

import argparse
from pathlib import Path

import images
import torch
import wide
from stopwatch import Stopwatch

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["wide", "images"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--size", type=int, default=224, help="pixels a side")
    parser.add_argument("--width", type=int, default=1024, help="of the model; channels")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="requests")
    parser.add_argument("--times", type=Path, help="write down when each answer was there")
    options = parser.parse_args()
    what = {"wide": wide, "images": images}[options.model]
    split: pl.Layout | pl.Tiles = pl.Layout(mesh={"model": options.devices}, layout={"hidden": "model"})
    if options.model == "images":
        split = pl.Tiles(rows=options.devices)
    torch.manual_seed(0)
    requests = what.make_data(options)[0].split(options.batch_size)
    watch = Stopwatch(options.times)
    with pl.load(None, what.make_model(options), split=split if options.devices > 1 else None, dims=wide.DIMS) as ask:
        for request in requests:
            ask(request)
            watch.step()


if __name__ == "__main__":
    main()
