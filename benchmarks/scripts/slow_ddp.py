"""One slow rank: torchrun --nproc-per-node 4 benchmarks/scripts/slow_ddp.py --straggler 3"""

import time

import torch
import torch.distributed as dist
from slow import Log, SlowLoss, make_data, make_model, parse
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = parse(__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = SlowLoss(options, rank)
    x, y = make_data(options)
    log = Log(options.times if rank == 0 else None)
    own = options.batch_size // world
    for step, rows in enumerate(torch.arange(len(x))[rank::world].split(own)):
        optimizer.zero_grad()
        loss(model, (x[rows], y[rows])).backward()
        optimizer.step()
        log.step(step + 1, own)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
