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
    parser = parse(__doc__)
    parser.add_argument("--tcp", action="store_true", help="over TCP alone, also on one host")
    options = parser.parse_args()
    replicas = world - 1
    server = rank == replicas
    if server:
        make(options.bytes // 4)
    how = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"]) if options.tcp else None
    name = "server" if server else f"replica{rank}"
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=how)
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
