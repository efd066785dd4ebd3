"""A transformer cut in the middle by torch's own pipeline on Gloo, by 1F1B:
torchrun --nproc-per-node 2 benchmarks/scripts/blocks_torch.py"""

import time

import torch
import torch.distributed as dist
from blocks import Transformer, cross_entropy, make_data, make_optimizer, parse
from peak import peak
from stopwatch import Stopwatch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    options = parse(__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with peak(options.memory, rank):
        ends = [options.depth * number // world for number in range(world + 1)]
        model = Transformer(options, range(ends[rank], ends[rank + 1]))
        optimizer = make_optimizer(model)
        stage = PipelineStage(model, rank, world, torch.device("cpu"))
        schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=cross_entropy)
        x, y = make_data(options)
        watch = Stopwatch(options.times if rank == 0 else None)
        for rows in torch.randperm(len(x)).split(options.batch_size):
            optimizer.zero_grad()
            schedule.step(x[rows]) if rank == 0 else schedule.step(target=y[rows])
            optimizer.step()
            watch.step()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
