"""torch's own pipeline on Gloo, a stack of LSTM layers cut in two halves, the batch in micro-batches:
torchrun --nproc-per-node 2 benchmarks/scripts/train_pipeline.py --model lstm --width 512 --depth 2"""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from stopwatch import Stopwatch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workload import Recurrent, make_data, make_optimizer, parse


class _Contiguous(torch.autograd.Function):
    """Gloo sends nothing else, and neither outputs of an LSTM with the batch first are, nor gradients of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.contiguous()


class Half(nn.Module):
    """One stage."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Contiguous.apply(self.layers(_Contiguous.apply(x)))


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    half = options.depth // world
    below, above = Recurrent(options.width, half, classes=0), Recurrent(options.width, half, options.width)
    model = Half(below if rank == 0 else above)
    optimizer = make_optimizer(options, model)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=F.cross_entropy)
    x, y = make_data(options, replicas=1)
    watch = Stopwatch(options.times if rank == 0 else None)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x)).split(options.batch_size):
            optimizer.zero_grad()
            schedule.step(x[rows]) if rank == 0 else schedule.step(target=y[rows])
            optimizer.step()
            watch.step()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
