"""A plain MLP for `paceline serve`; `served_mlp.py PATH CALLS` saves it and prints the seconds of a direct call."""

import json
import os
import sys
import time

import torch
from torch import nn

WIDTH = int(os.environ.get("SERVED_WIDTH", "1024"))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    ).eval()


def main(path: str, calls: int) -> None:
    from safetensors.torch import save_file  # peers have none, and need none

    model = make_model()
    save_file(model.state_dict(), path)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    x, seconds = torch.ones(1, 256), []
    with torch.no_grad():
        for _ in range(calls):
            began = time.perf_counter()
            model(x)
            seconds.append(time.perf_counter() - began)
    print(json.dumps(sorted(seconds)[calls // 2]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
