"""Push and pull with torch.distributed.rpc: torchrun --nproc-per-node 3 benchmarks/scripts/push_rpc.py

The last rank is the server. A step is one call, there with the gradient and back with the parameters.
"""

import os
import threading
import time

import torch
from push import LR, check, meet, parse, times_of
from stopwatch import Stopwatch
from torch.distributed import rpc


class Server:
    weight: torch.Tensor
    lock = threading.Lock()  # calls come in on several threads


def make(count: int) -> None:
    Server.weight = torch.zeros(count)


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    with Server.lock:
        Server.weight.add_(gradient, alpha=-LR)
    return Server.weight


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = parse(__doc__).parse_args()
    replicas = world - 1
    server = rank == replicas
    if server:
        make(options.bytes // 4)
    rpc.init_rpc("server" if server else f"replica{rank}", rank=rank, world_size=world)
    if not server:
        gradient = torch.ones(options.bytes // 4)
        meet(options, rank, replicas)
        watch = Stopwatch(times_of(options, rank))
        for _ in range(options.steps):
            weight = rpc.rpc_sync("server", push_pull, args=(gradient,))
            watch.step()
        assert weight.shape == gradient.shape
    rpc.shutdown()  # waits for all
    if server:
        check(Server.weight.amax().item(), replicas * options.steps)
    time.sleep(0.2)


if __name__ == "__main__":
    main()
