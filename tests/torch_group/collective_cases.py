"""Collectives and messages, each against its definition."""

from __future__ import annotations

import functools
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from group_inputs import LARGE, LONG, TIMEOUT_S, case, crooked, numbered, of, same

from paceline.torch_group.rounds import SLOT_BYTES


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
    floats = (torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64)
    for dtype in (*floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        for size in (33, 100_000):
            mine = of(rank, size, dtype=dtype)
            dist.all_reduce(mine)
            wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
            everybody = [of(other, size, dtype=dtype).to(wide) for other in range(ranks)]
            same(mine.to(wide), functools.reduce(torch.add, everybody).to(dtype).to(wide))
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False, True]
    dist.all_reduce(flags := torch.tensor([rank == 0, False, True]), dist.ReduceOp.BAND)
    assert flags.tolist() == [False, False, True]
    for op, wanted in ((dist.ReduceOp.BOR, 0b1111), (dist.ReduceOp.BAND, 0b1000), (dist.ReduceOp.BXOR, 0b1111)):
        bits = torch.tensor([8 + (1 << rank)], dtype=torch.int16)
        dist.all_reduce(bits, op)
        assert bits.item() == wanted
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
    whole_sum = crooked(torch.zeros(2, 5))
    dist.reduce_scatter_tensor(whole_sum, of(rank, 5, 6).t())
    same(whole_sum, torch.stack([of(other, 5, 6).t() for other in range(ranks)]).sum(0)[2 * rank : 2 * rank + 2])
    side_by_side = crooked(torch.zeros(ranks * 5, 6))
    dist.all_gather_into_tensor(side_by_side, of(rank, 6, 5).t())
    same(side_by_side, whole.transpose(1, 2).reshape(-1, 6))
    dist.reduce(mine := crooked(of(rank, 6, 5)), dst=2, op=dist.ReduceOp.MAX)
    same(mine, whole.amax(0) if rank == 2 else of(rank, 6, 5))
    into = [crooked(torch.zeros(5, 6)) for _ in range(ranks)]
    dist.gather(of(rank, 6, 5).t(), into if rank == 1 else None, dst=1)
    same(torch.stack(into), whole.transpose(1, 2) * (rank == 1))
    dist.all_to_all(into, [of(10 * rank + other, 6, 5).t() for other in range(ranks)])
    same(torch.stack(into), torch.stack([of(10 * other + rank, 6, 5).t() for other in range(ranks)]))
    rows = crooked(torch.zeros(6, 5))
    dist.all_to_all_single(rows, of(rank, 5, 6).t())
    same(rows, torch.cat([of(other, 5, 6).t()[2 * rank : 2 * rank + 2] for other in range(ranks)]))
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
    whole = [torch.empty(ranks * 4), torch.empty(ranks * 4)]
    with dist._coalescing_manager():
        for tensor in whole:
            dist.all_gather_into_tensor(tensor, of(rank, 4))
    same(whole[1], torch.cat([of(other, 4) for other in range(ranks)]))
    parts = [torch.empty(4), torch.empty(4)]
    with dist._coalescing_manager():
        for tensor in parts:
            dist.reduce_scatter_tensor(tensor, of(rank, ranks * 4))
    same(parts[1], torch.stack([of(r, ranks * 4) for r in range(ranks)]).sum(0)[4 * rank : 4 * rank + 4])
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
    # The name it has now, and the one it had in earlier versions of torch.
    name = "reduce_scatter_single" if hasattr(functional, "reduce_scatter_single") else "reduce_scatter_tensor"
    own_part = getattr(functional, name)(of(rank, 6), "sum", 0, dist.group.WORLD)
    same(own_part, total[2 * rank : 2 * rank + 2])
    same(functional.broadcast(of(rank, 6), 1, dist.group.WORLD), of(1, 6))


@case
def sparse_sums(rank: int, ranks: int) -> None:
    """Of different entries on every rank, some of them none, some of them twice."""
    for shape, sparse_dims in (((6,), 1), ((4, 5), 2), ((7, 2, 3), 1)):
        for dtype in (torch.float32, torch.float64, torch.int64):

            def entries(of_rank: int, shape=shape, sparse_dims=sparse_dims, dtype=dtype) -> torch.Tensor:
                count = 3 * of_rank
                where = torch.stack([(of(of_rank, count) * 100).long() % size for size in shape[:sparse_dims]])
                return torch.sparse_coo_tensor(where, of(of_rank, count, *shape[sparse_dims:], dtype=dtype), shape)

            wanted = torch.stack([entries(other).to_dense() for other in range(ranks)]).sum(0)
            mine = entries(rank)
            dist.all_reduce(mine)
            assert mine.is_sparse
            same(mine.to_dense(), wanted)
            if dtype.is_floating_point:
                dist.all_reduce(mine := entries(rank), dist.ReduceOp.AVG)
                same(mine.to_dense(), wanted / ranks)


@case
def tensors_of_inference_mode(rank: int, ranks: int) -> None:
    with torch.inference_mode():
        frozen = of(rank, 4, 6)
        received = torch.zeros(6, 4).t()
        work = dist.irecv(received, src=(rank - 1) % ranks)
        dist.all_reduce(frozen)
    total = torch.stack([of(other, 4, 6) for other in range(ranks)]).sum(0)
    same(frozen.clone(), total)
    dist.all_reduce(frozen)
    same(frozen.clone(), ranks * total)
    dist.all_reduce(frozen.t(), dist.ReduceOp.AVG)
    dist.broadcast(frozen, src=1)
    dist.send(frozen, dst=(rank + 1) % ranks)
    work.wait()
    same(received.clone(), ranks * total)
    with torch.inference_mode():
        dist.all_gather(into := [torch.empty(4, 6) for _ in range(ranks)], frozen)
        same(torch.stack(into), torch.stack([ranks * total] * ranks))
    group = dist.new_group(list(range(ranks)))  # its first call is in inference mode, and its second is not
    with torch.inference_mode():
        dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(ones := torch.ones(3), group=group)
    same(ones, torch.full((3,), float(ranks)))


@case
def objects(rank: int, ranks: int) -> None:
    told = [{"from": 1}, "x" * 1000] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"from": 1}, "x" * 1000]
    into = [None] * ranks if rank == 2 else None
    dist.gather_object(("rank", rank), into, dst=2)
    assert into == ([("rank", other) for other in range(ranks)] if rank == 2 else None)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(ranks)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


@case
def works(rank: int, ranks: int) -> None:
    work = dist.all_reduce(mine := torch.ones(3), async_op=True)
    assert work.wait(timedelta(seconds=30))
    assert work.is_success()
    assert work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist() == [2.0 * ranks] * 3
    dist.group.WORLD.allreduce(mine).wait()  # not a list: so DistributedDataParallel calls it
    assert mine.tolist() == [ranks**2] * 3
    work = dist.irecv(into := torch.zeros(2), src=(rank + 1) % ranks)
    assert not work.is_completed()
    dist.barrier()
    dist.send(torch.ones(2), dst=(rank - 1) % ranks)
    assert work.get_future().wait()[0] is into
    assert into.tolist() == [1, 1]
    assert work.is_completed()


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


@case
def a_group_after_the_last(rank: int, ranks: int) -> None:
    backend = dist.get_backend()
    dist.destroy_process_group()
    store = dist.FileStore(f"{sys.argv[3]}-again", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(mine := of(rank, 3))
    same(mine, of(0, 3) + of(1, 3) + of(2, 3))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=TIMEOUT_S))
