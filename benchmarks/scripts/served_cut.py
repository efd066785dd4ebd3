"""A wide MLP or a conv net for `paceline serve`, the models of `ask.py`; `served_cut.py PATH` saves it and prints the
shape of a request."""

import argparse
import json
import os
import sys

import images
import torch
import wide
from safetensors.torch import save_file

import paceline as pl

SIZES = {
    "full": {"width": 1024, "hidden": 4096, "depth": 4, "batch_size": 8},
    "quick": {"width": 512, "hidden": 2048, "depth": 4, "batch_size": 8},
    "tiny": {"width": 8, "hidden": 12, "depth": 1, "batch_size": 2},
}
PICTURES = {
    "full": {"size": 224, "width": 32, "depth": 6, "batch_size": 1},
    "quick": {"size": 96, "width": 16, "depth": 6, "batch_size": 1},
    "tiny": {"size": 16, "width": 4, "depth": 2, "batch_size": 1},
}
KIND = os.environ.get("SERVED_MODEL", "wide")
SCALE = os.environ.get("SERVED_SCALE", "full")
OPTIONS = argparse.Namespace(**(PICTURES if KIND == "images" else SIZES)[SCALE], steps=1)


WHAT = images if KIND == "images" else wide

if __name__ == "__main__":
    model = WHAT.make_model(OPTIONS)
    if len(sys.argv) > 1:
        save_file(model.state_dict(), sys.argv[1])
        print(json.dumps(list(WHAT.make_data(OPTIONS)[0][: OPTIONS.batch_size].shape)))
    else:
        dims = wide.DIMS if KIND == "wide" else None
        pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), wide.loss, dims=dims)
