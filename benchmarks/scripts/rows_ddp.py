"""A few rows of a large table: torchrun --nproc-per-node 2 benchmarks/scripts/rows_ddp.py --sparse"""

import time

import torch
import torch.distributed as dist
from rows import Log, Model, batch_size, loss, make_data, parse
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--sparse", action="store_true", help="gradients of the table as rows")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Model(options.rows, sparse=options.sparse), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = Log(options.times if rank == 0 else None)
    for ids in make_data(options).split(batch_size(options)):
        optimizer.zero_grad()
        loss(model, ids.chunk(world)[rank]).backward()
        optimizer.step()
        log.step()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
