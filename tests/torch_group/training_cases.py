"""What torch builds on a process group: DistributedDataParallel, DTensor, FSDP, pipelining; against one process."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from group_inputs import case, of, same
from torch import nn


def mlp(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@case
def ddp(rank: int, ranks: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    x = of(50, ranks * 4, 6)
    plain, shared = mlp(), mlp()
    plain(x).square().mean().backward()
    wrapped = DistributedDataParallel(shared, find_unused_parameters=True)
    wrapped(x[rank * 4 : rank * 4 + 4]).square().mean().backward()
    for got, wanted in zip(gradients(shared), gradients(plain), strict=True):
        same(got, wanted)


@case
def ddp_of_a_sparse_embedding(rank: int, ranks: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1))
    shared = copy.deepcopy(plain)
    words = torch.arange(ranks * 4).view(ranks, 4) % 5
    plain(words).square().mean().backward()
    wrapped = DistributedDataParallel(shared)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(words[rank]).square().mean().backward()
        for got, wanted in zip(gradients(shared), gradients(plain), strict=True):
            assert got.is_sparse == wanted.is_sparse
            same(got.to_dense(), wanted.to_dense())


@case
def dtensor(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("model",))
    x = of(60, 4, 6)
    plain, cut = mlp(), mlp()
    wanted = plain(x)
    wanted.sum().backward()
    parallelize_module(cut, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = cut(x)
    same(got, wanted)
    got.sum().backward()
    for parameter, whole in zip(cut.parameters(), gradients(plain), strict=True):
        assert isinstance(parameter.grad, DTensor)
        same(parameter.grad.full_tensor(), whole)


@case
def fsdp(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    x = of(70, ranks * 2, 6)
    plain, cut = mlp(13), mlp(13)  # 13 does not divide by the ranks
    for layer in (cut[0], cut[2], cut):
        fully_shard(layer, mesh=mesh)
    ours, theirs = (torch.optim.AdamW(model.parameters(), 0.1) for model in (cut, plain))
    for _ in range(2):
        plain(x).square().mean().backward()
        cut(x[rank * 2 : rank * 2 + 2]).square().mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(cut.parameters(), plain.parameters(), strict=True):
        same(got.full_tensor(), wanted)  # type: ignore[attr-defined]


@case
def checkpoints(rank: int, ranks: int) -> None:
    """torch.distributed.checkpoint, while it saves and afterwards; and a state that only rank 0 has."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    plain, cut = mlp(), fully_shard(mlp(13))
    folder = f"{sys.argv[3]}-checkpoint"
    state = get_model_state_dict(cut)
    checkpoint.async_save(state, checkpoint_id=folder, process_group=dist.new_group()).result()
    wanted = [parameter.full_tensor() for parameter in cut.parameters()]
    for parameter in cut.parameters():
        nn.init.zeros_(parameter)
    checkpoint.load(state, checkpoint_id=folder)
    for parameter, value in zip(cut.parameters(), wanted, strict=True):
        same(parameter.full_tensor(), value)
    whole, cut = plain.state_dict() if rank == 0 else {}, fully_shard(mlp())
    for parameter in cut.parameters():
        nn.init.zeros_(parameter)
    set_model_state_dict(cut, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for parameter, value in zip(cut.parameters(), plain.parameters(), strict=True):
        same(parameter.full_tensor(), value)


@case
def pipelining(rank: int, ranks: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(ranks)))
    torch.manual_seed(0)
    mine = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(ranks)))[rank]
    x, y = of(80, 8, 5), of(81, 8, 5)
    loss = nn.functional.mse_loss
    loss(plain(x), y).backward()
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    first_words = getattr(stage, "_get_init_p2p_neighbors_ops", list)  # torch 2.15 has none
    if len({op.tensor.dtype for op in first_words()}) > 1:
        # torch 2.9 greets its neighbours with 8 bytes where it awaits 4, and Gloo aborts there.
        stage._get_init_p2p_neighbors_ops = list
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(**({"target": y} if rank == ranks - 1 else {}))
    for got, wanted in zip(gradients(mine), gradients(plain[rank]), strict=True):
        same(got, wanted)
