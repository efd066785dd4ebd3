"""What three processes do on the backend "paceline", each case against its definition.

`group_cases.py RANK RANKS STORE` is one of them.

All ranks know what every rank puts in, so each can work out for itself what must come out. A line of JSON says of every
case whether it went well; the first that did not is the last.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline.torch_backend
from paceline.errors import PacelineError, ReplicaDied, Stalled
from paceline.exchange.mailboxes import ROOM_BYTES
from paceline.torch_group.space import SLOT_BYTES

TIMEOUT_S = 60.0
LONG = SLOT_BYTES // 4 + 12345  # elements of float32: two rounds at least, the last a short one
LARGE = ROOM_BYTES // 4 + 1000  # more than a mailbox holds
CASES: dict[str, Callable[[int, int], None]] = {}


def case(run: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[run.__name__] = run
    return run


@functools.lru_cache(64)
def drawn(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank puts in."""
    numbers = drawn(rank, shape).clone()
    return numbers.to(dtype) if dtype.is_floating_point else (numbers * 100).to(dtype)


def numbered(first: int, length: int) -> torch.Tensor:
    return torch.arange(first, first + length, dtype=torch.float32)


def same(got: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **tolerance)


def crooked(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * 2), 7.0).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────────────


@case
def all_reduce(rank: int, ranks: int) -> None:
    for size in (0, 1, 1000, 40_000, LONG):
        total = torch.stack([of(other, size) for other in range(ranks)])
        for op, wanted in {
            dist.ReduceOp.SUM: total.sum(0),
            dist.ReduceOp.AVG: total.mean(0),
            dist.ReduceOp.MAX: total.amax(0),
            dist.ReduceOp.MIN: total.amin(0),
            dist.ReduceOp.PRODUCT: total.prod(0),
        }.items():
            mine = of(rank, size)
            dist.all_reduce(mine, op)
            same(mine, wanted)
    same_bits = of(rank, LONG)
    dist.all_reduce(same_bits)
    everybody = [torch.empty_like(same_bits) for _ in range(ranks)]
    dist.all_gather(everybody, same_bits)
    assert all(torch.equal(theirs, same_bits) for theirs in everybody)


@case
def all_reduce_of_every_type(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8):
        for size in (33, 100_000):
            mine = of(rank, size, dtype=dtype)
            dist.all_reduce(mine)
            if dtype.is_floating_point:
                wanted = torch.stack([of(other, size, dtype=dtype).double() for other in range(ranks)]).sum(0)
                same(mine, wanted.to(dtype))
            else:
                same(mine, functools.reduce(torch.add, [of(other, size, dtype=dtype) for other in range(ranks)]))
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False, True]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << ranks) - 1
    scaled = of(rank, 5)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    same(scaled, torch.stack([of(other, 5) for other in range(ranks)]).sum(0) / 2)


@case
def tensors_that_are_not_contiguous(rank: int, ranks: int) -> None:
    whole = torch.stack([of(other, 6, 5) for other in range(ranks)])
    mine = crooked(of(rank, 6, 5))
    dist.all_reduce(mine)
    same(mine, whole.sum(0))
    turned = of(rank, 6, 5).t()
    dist.broadcast(turned, src=1)
    same(turned, whole[1].t())
    into = [crooked(torch.zeros(5, 6)) for _ in range(ranks)]
    dist.all_gather(into, of(rank, 6, 5).t())
    same(torch.stack(into), whole.transpose(1, 2))
    scattered = crooked(torch.zeros(6, 5))
    dist.scatter(scattered, [of(other, 5, 6).t() for other in range(ranks)] if rank == 0 else None, src=0)
    same(scattered, of(rank, 5, 6).t())
    summed = crooked(torch.zeros(6, 5))
    dist.reduce_scatter(summed, [of(rank + 10 * other, 5, 6).t() for other in range(ranks)])
    same(summed, torch.stack([of(other + 10 * rank, 5, 6).t() for other in range(ranks)]).sum(0))
    received = crooked(torch.zeros(5, 6))
    work = dist.irecv(received, src=(rank - 1) % ranks)
    dist.send(of(rank, 6, 5).t(), dst=(rank + 1) % ranks)
    work.wait()
    same(received, whole[(rank - 1) % ranks].t())


@case
def gathers(rank: int, ranks: int) -> None:
    for size in (0, 7, LONG):
        everybody = [of(other, size) for other in range(ranks)]
        into = [torch.empty(size) for _ in range(ranks)]
        dist.all_gather(into, of(rank, size))
        for got, wanted in zip(into, everybody, strict=True):
            same(got, wanted)
        whole = torch.empty(ranks * size)
        dist.all_gather_into_tensor(whole, of(rank, size))
        same(whole, torch.cat(everybody))
        into = [torch.empty(size) for _ in range(ranks)] if rank == 2 else None
        dist.gather(of(rank, size), into, dst=2)
        for got, wanted in zip(into or [], everybody, strict=False):
            same(got, wanted)
    uneven = [torch.empty(other + 1, 3) for other in range(ranks)]
    dist.all_gather(uneven, of(rank, rank + 1, 3))
    for other in range(ranks):
        same(uneven[other], of(other, other + 1, 3))
    found: list[object] = [None] * ranks
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(ranks)]


@case
def reductions_to_parts(rank: int, ranks: int) -> None:
    for size in (5, LONG):
        total = torch.stack([of(other, ranks, size) for other in range(ranks)])
        into = torch.empty(size)
        dist.reduce_scatter_tensor(into, of(rank, ranks, size).view(-1))
        same(into, total.sum(0)[rank])
        dist.reduce_scatter(into, list(of(rank, ranks, size)), op=dist.ReduceOp.AVG)
        same(into, total.mean(0)[rank])
        whole = of(rank, ranks, size)
        dist.reduce_scatter_tensor(whole[rank], whole.view(-1))  # in place
        same(whole[rank], total.sum(0)[rank])
        mine = of(rank, size)
        dist.reduce(mine, dst=1, op=dist.ReduceOp.MAX)
        wanted = torch.stack([of(other, size) for other in range(ranks)]).amax(0)
        same(mine, wanted if rank == 1 else of(rank, size))


@case
def spreading(rank: int, ranks: int) -> None:
    for size in (1, 9, LONG):
        mine = of(rank, size)
        dist.broadcast(mine, src=2)
        same(mine, of(2, size))
        parts = [of(other + 5, size) for other in range(ranks)] if rank == 1 else None
        dist.scatter(mine, parts, src=1)
        same(mine, of(rank + 5, size))


@case
def all_to_all(rank: int, ranks: int) -> None:
    for size in (2, SLOT_BYTES // 4):
        into = [torch.empty(size) for _ in range(ranks)]
        dist.all_to_all(into, [of(10 * rank + other, size) for other in range(ranks)])
        for other in range(ranks):
            same(into[other], of(10 * other + rank, size))
    # Rank r sends r + s + 1 rows to rank s.
    send = [rank + other + 1 for other in range(ranks)]
    mine = torch.cat([of(10 * rank + other, send[other], 3) for other in range(ranks)])
    got = torch.empty(sum(send), 3)
    dist.all_to_all_single(got, mine, send, send)
    same(got, torch.cat([of(10 * other + rank, rank + other + 1, 3) for other in range(ranks)]))


@case
def several_at_once(rank: int, ranks: int) -> None:
    many = [of(rank, 4), of(rank, 3, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    same(many[1], torch.stack([of(other, 3, 3) for other in range(ranks)]).sum(0))
    work = dist.all_reduce(many[0], async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    same(work.get_future().wait()[0], many[0])
    from torch.distributed import _functional_collectives as functional

    same(
        functional.all_gather_tensor(of(rank, 2, 2), 1, dist.group.WORLD), torch.cat([of(r, 2, 2) for r in range(3)], 1)
    )
    total = torch.stack([of(other, 6) for other in range(ranks)]).sum(0)
    same(functional.reduce_scatter_single(of(rank, 6), "sum", 0, dist.group.WORLD), total[2 * rank : 2 * rank + 2])
    same(functional.broadcast(of(rank, 6), 1, dist.group.WORLD), of(1, 6))


# ── one to one ───────────────────────────────────────────────────────────────────────────────────────────────


@case
def sends_and_receives(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    # Receives first, tags in another order than they are sent, and more than a mailbox holds.
    got = {tag: torch.empty(size) for tag, size in ((1, 3), (2, 4), (3, LARGE))}
    receives = [dist.irecv(got[tag], src=before, tag=tag) for tag in (3, 2, 1)]
    sends = [dist.isend(numbered(rank + tag, got[tag].numel()), dst=after, tag=tag) for tag in (1, 2, 3)]
    for work in [*receives, *sends]:
        work.wait()
    for tag, tensor in got.items():
        assert torch.equal(tensor, numbered(before + tag, tensor.numel()))
    twice = torch.empty(2, 5)
    ops = [dist.P2POp(dist.irecv, row, before) for row in twice]
    ops += [dist.P2POp(dist.isend, of(rank + k, 5), after) for k in range(2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(twice, torch.stack([of(before, 5), of(before + 1, 5)]))
    if rank == 0:
        for _ in range(ranks - 1):
            anybodys = torch.empty(2)
            source = dist.recv(anybodys)
            same(anybodys, of(source, 2))
    else:
        dist.send(of(rank, 2), dst=0)


@case
def a_send_does_not_mind_a_collective(rank: int, ranks: int) -> None:
    """More than a mailbox holds, to somebody who is busy with something else first."""
    if rank == 0:
        dist.send(numbered(0, LARGE), dst=1)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.recv(into := torch.empty(LARGE), src=0)
        assert torch.equal(into, numbered(0, LARGE))


@case
def subgroups(rank: int, ranks: int) -> None:
    outer, alone = dist.new_group([0, 2]), dist.new_group([1])
    if rank == 1:
        mine = of(1, 4)
        dist.all_reduce(mine, group=alone)
        same(mine, of(1, 4))
    else:
        mine = of(rank, 4)
        dist.all_reduce(mine, group=outer)
        same(mine, of(0, 4) + of(2, 4))
        dist.broadcast(mine, src=2, group=outer)
    dist.barrier()


# ── what torch builds on it ──────────────────────────────────────────────────────────────────────────────────


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
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(**({"target": y} if rank == ranks - 1 else {}))
    for got, wanted in zip(gradients(mine), gradients(plain[rank]), strict=True):
        same(got, wanted)


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def one_sentence(kind: type[PacelineError], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    assert all(word in str(raised.value) for word in words), raised.value


@case
def what_cannot_be_is_one_sentence(rank: int, ranks: int) -> None:
    with one_sentence(PacelineError, "ReduceOp.AVG", "torch.int64"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG)
    with one_sentence(PacelineError, "sparse"):
        dist.all_reduce(torch.eye(2).to_sparse())
    with one_sentence(PacelineError, "output of 3 elements for an input of 2"):
        dist.all_gather([torch.empty(3) for _ in range(ranks)], torch.ones(2))


@case
def different_calls_are_one_sentence(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))  # it cannot be used afterwards
    with one_sentence(PacelineError, f"rank {rank} calls", "the same calls in the same order"):
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.all_gather([torch.empty(1) for _ in range(ranks)], torch.ones(1), group=group)


@case
def a_late_rank_is_one_sentence(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=1))
    if rank == 0:
        began = time.monotonic()
        with one_sentence(Stalled, "rank 0", "all_reduce", "rank 1, 2"):
            dist.all_reduce(torch.ones(4), group=group)
        assert time.monotonic() - began < TIMEOUT_S / 2
        with one_sentence(Stalled, "rank 0", "recv", "rank 2"):
            dist.recv(torch.ones(4), src=2, group=group)
    dist.barrier()


@case
def a_death_is_one_sentence(rank: int, ranks: int) -> None:
    """The last case: rank 2 does not come back."""
    group = dist.new_group(list(range(ranks)))
    if rank == 2:
        print(json.dumps({"case": "a_death_is_one_sentence", "wrong": None}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with one_sentence(ReplicaDied, f"rank {rank}", "rank 2", "whose process has ended"):
        dist.all_reduce(torch.ones(LONG))
    with one_sentence(ReplicaDied, f"rank {rank}", "rank 2", "whose process has ended"):
        dist.recv(torch.ones(1), src=2, group=group)
    assert time.monotonic() - began < TIMEOUT_S / 2


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
