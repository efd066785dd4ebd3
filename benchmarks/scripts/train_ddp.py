"""DistributedDataParallel on Gloo: torchrun --nproc-per-node 2 benchmarks/scripts/train_ddp.py

Its input costs next to nothing: neither a sampler nor a loader stands between it and the tensors.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from stopwatch import Stopwatch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from workload import loss, make_data, make_model, make_optimizer, parse


def as_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook, which DDP refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--bucket-view", action="store_true", help="gradient_as_bucket_view=True")
    parser.add_argument("--fused", action="store_true", help="fused=True in the optimizer")
    parser.add_argument("--hook", choices=["bf16", "powersgd"], help="a communication hook of torch's")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(options), gradient_as_bucket_view=options.bucket_view)
    if options.hook == "bf16":
        model.register_comm_hook(None, as_bf16)
    elif options.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = make_optimizer(options, model, fused=options.fused or None)
    x, y = make_data(options, world)
    watch = Stopwatch(options.times if rank == 0 else None)
    for _ in range(options.epochs):  # all ranks were seeded alike, so all draw the same order
        for rows in torch.randperm(len(x))[rank::world].split(options.batch_size):
            optimizer.zero_grad()
            loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
            watch.step()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
