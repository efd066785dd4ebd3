"""torch's own tensor parallelism: torchrun --nproc-per-node 2 benchmarks/scripts/wide_torch.py --backend gloo"""

import os
import sys

import torch.distributed as dist
from stopwatch import Stopwatch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from wide import go, make_model, make_optimizer, parse

import paceline.torch_backend


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--backend", choices=["gloo", paceline.torch_backend.register()], default="gloo")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(options)
    plan = {"*.fc1": ColwiseParallel(), "*.fc2": RowwiseParallel()}
    model = parallelize_module(model, mesh, plan)
    watch = Stopwatch(options.times if dist.get_rank() == 0 else None)
    go(options, model, make_optimizer(model), watch.step)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may still be ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
