"""What three processes do on the backend "paceline". `group_cases.py RANK RANKS STORE` is one of them.

A line of JSON says of every case whether it went well; the first that did not is the last.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta

import collective_cases  # noqa: F401
import torch
import torch.distributed as dist
import training_cases  # noqa: F401
import wrong_cases  # noqa: F401  # after the others: its last case ends a process
from group_inputs import CASES, TIMEOUT_S

import paceline.torch_backend


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        paceline.torch_backend.register(),
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    for name, run in CASES.items():
        try:
            run(rank, ranks)
        except BaseException:
            print(json.dumps({"case": name, "wrong": traceback.format_exc()}), flush=True)
            os._exit(1)
        print(json.dumps({"case": name, "wrong": None}), flush=True)
    os._exit(0)  # torch would say goodbye to the dead


if __name__ == "__main__":
    main()
