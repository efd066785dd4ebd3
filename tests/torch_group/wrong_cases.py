"""What goes wrong: one sentence, a RuntimeError as torch raises, on every rank, and in time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from group_inputs import LONG, TIMEOUT_S, case, one_sentence

from paceline.torch_group.errors import CallError, GroupBroken, RankDied, RankLate


def still_together(ranks: int, group: dist.ProcessGroup | None = None) -> None:
    """The group works as if nothing had been."""
    dist.all_reduce(ones := torch.ones(LONG), group=group)
    assert bool((ones == ranks).all())


@case
def what_cannot_be_is_one_sentence(rank: int, ranks: int) -> None:
    """On the rank that calls it, with what would be right."""
    op, two = dist.ReduceOp, [torch.ones(2), torch.ones(2)]
    three, whole = [*two, torch.ones(2)], torch.ones(2, dtype=torch.int64)
    broadcast = dist.BroadcastOptions()
    broadcast.rootRank = -1
    group = dist.group.WORLD
    expected: dict[tuple[str, ...], Callable[[], object]] = {
        ("ReduceOp.AVG", "torch.int64"): lambda: dist.all_reduce(whole, op.AVG),
        ("ReduceOp.BAND", "torch.float32"): lambda: dist.all_reduce(two[0], op.BAND),
        ("ReduceOp.SUM", "torch.uint16"): lambda: dist.all_reduce(whole.to(torch.uint16)),
        ("ReduceOp.MAX", "torch.complex64"): lambda: dist.reduce_scatter(
            torch.ones(2, dtype=torch.complex64), [torch.ones(2, dtype=torch.complex64)] * 3, op.MAX
        ),
        ("MAX", "sparse_coo"): lambda: dist.all_reduce(torch.eye(2).to_sparse(), op.MAX),
        ("sparse_coo", "dense tensor"): lambda: dist.broadcast(torch.eye(2).to_sparse(), 0),
        ("on meta",): lambda: dist.all_reduce(torch.empty(2, device="meta")),
        ("expanded",): lambda: dist.all_reduce(torch.ones(1).expand(4)),
        ("empty list",): lambda: group.allreduce([]),
        ("torch.float32 and torch.int64",): lambda: group.allreduce([two[0], whole]),
        ("broadcast has the root 5",): lambda: dist.broadcast(two[0], 5),
        ("broadcast has the root -1",): lambda: group.broadcast([two[0]], broadcast),
        ("output of 3 elements for an input of 2",): lambda: dist.all_gather([torch.empty(3)] * ranks, two[0]),
        ("all_gather", "list of 2", "give 3"): lambda: dist.all_gather(two, two[0]),
        ("reduce_scatter", "list of 2", "give 3"): lambda: dist.reduce_scatter(two[0], two),
        ("all_to_all", "list of 2", "give 3"): lambda: dist.all_to_all(two, three),
        ("7 elements", "3 ranks must divide it"): lambda: dist.all_gather_into_tensor(torch.ones(7), two[0]),
        ("output of 3 elements",): lambda: dist.reduce_scatter_tensor(torch.ones(3), torch.ones(6)),
        ("[1, 1]", "give 3 sizes"): lambda: dist.all_to_all_single(two[0], two[0], [1, 1], [1, 1]),
        ("send to rank 7",): lambda: dist.send(two[0], 7),
    }
    for words, call in expected.items():
        with one_sentence(CallError, *words):
            call()
    still_together(ranks)


@case
def what_one_rank_refuses_is_told_to_the_others(rank: int, ranks: int) -> None:
    began = time.monotonic()
    with one_sentence(
        CallError, "list of 2 tensors: give 3" if rank == 0 else "rank 0 has refused its part in scatter"
    ):
        dist.scatter(torch.ones(2), [torch.ones(2)] * 2 if rank == 0 else None, src=0)
    with one_sentence(CallError, "list of 1 tensors: give 3" if rank == 1 else "rank 1 has refused its part in gather"):
        dist.gather(torch.ones(2), [torch.ones(2)] if rank == 1 else None, dst=1)
    with one_sentence(CallError, "output of 4 elements" if rank == 2 else "rank 2 has refused its part in all_gather"):
        dist.all_gather([torch.ones(4 if rank == 2 else 2) for _ in range(ranks)], torch.ones(2))
    assert time.monotonic() - began < TIMEOUT_S / 2
    still_together(ranks)


@case
def what_differs_between_ranks_is_told_to_all(rank: int, ranks: int) -> None:
    """Rank 2 calls something else each time. Every rank raises, nobody's tensor is touched, and the group goes on."""
    odd = rank == 2
    mine = torch.ones(4 if odd else 3)
    parts = [torch.ones(4 if odd else 3) for _ in range(ranks)]
    typed = torch.ones(3, dtype=torch.int32 if odd else torch.float32)
    sparse = torch.eye(3 if odd else 2).to_sparse()
    cut = [2, 1, 1] if odd else [1, 1, 1]
    op = dist.ReduceOp
    calls: dict[str, Callable[[], object]] = {
        "all_reduce of torch.float32 (16 bytes, SUM)": lambda: dist.all_reduce(mine),
        "all_reduce of torch.int32 (12 bytes, SUM)": lambda: dist.all_reduce(typed),
        "all_reduce of torch.float32 (12 bytes, MAX)": lambda: dist.all_reduce(
            torch.ones(3), op.MAX if odd else op.SUM
        ),
        "broadcast of torch.float32 (12 bytes, root 1)": lambda: dist.broadcast(torch.ones(3), 1 if odd else 0),
        "broadcast of torch.float32 (16 bytes, root 0)": lambda: dist.broadcast(mine, 0),
        "reduce of torch.float32 (16 bytes, root 0, SUM)": lambda: dist.reduce(mine, 0),
        "scatter of torch.float32 (16 bytes, root 1)": lambda: dist.scatter(mine, parts if rank == 1 else None, 1),
        "gather of torch.float32 (16 bytes, root 0)": lambda: dist.gather(mine, parts if rank == 0 else None, 0),
        "all_gather of torch.float32 (48 bytes)": lambda: dist.all_gather(parts, mine),
        "reduce_scatter of torch.float32 (48 bytes, SUM)": lambda: dist.reduce_scatter(mine, parts),
        "rank 2 sends 2 elements to rank 0, which has room for 1": lambda: dist.all_to_all_single(
            torch.ones(3), torch.ones(sum(cut)), [1, 1, 1], cut
        ),
        "rank 2 calls all_reduce with a sparse tensor of shape [3, 3]": lambda: dist.all_reduce(sparse),
        "barrier": lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4)),
    }
    for words, call in calls.items():
        with one_sentence(CallError, words):
            call()
    assert all(bool((tensor == 1).all()) for tensor in (mine, *parts, typed))
    # The list of rank 0 has the same bytes in all as that of the others, but not in the same places.
    with one_sentence(CallError, "the same calls"):
        lengths = (2, 3, 1) if rank == 0 else (2, 1, 3)
        dist.all_gather([torch.ones(length) for length in lengths], torch.ones(lengths[rank]))
    still_together(ranks)


@case
def what_is_received_as_something_else_is_one_sentence(rank: int, ranks: int) -> None:
    """It is told to whoever waits for it, not to the all_reduce in which it happens to arrive."""
    if rank == 0:
        dist.send(torch.ones(2), dst=1)
        dist.send(torch.ones(2), dst=1, tag=1)
    works = (
        [
            dist.irecv(torch.empty(3), src=0),
            dist.irecv(torch.empty(1, dtype=torch.int64), src=0, tag=1),
        ]
        if rank == 1
        else []
    )
    still_together(ranks)
    for work, words in zip(works, ("12 bytes of torch.float32", "8 bytes of torch.int64"), strict=False):
        with one_sentence(CallError, words, "from rank 0", "which has sent 8 of torch.float32"):
            work.wait()


@case
def a_call_has_a_time_limit_of_its_own(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=0.5)
    began = time.monotonic()
    if rank == 0:
        work = dist.irecv(torch.ones(1), src=1, group=group)
        with one_sentence(RankLate, "rank 0", "timeout of 0.2 s in recv", "for rank 1"):
            work.wait(timedelta(seconds=0.2))
        with one_sentence(RankLate, "rank 0", "timeout of 0.5 s in all_reduce", "for rank 1, 2"):
            group.allreduce([torch.ones(1)], opts)
        with one_sentence(GroupBroken, "cannot be used any more", "timeout of 0.5 s"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if rank:  # they come too late, and are told at once
        with one_sentence(GroupBroken, f"rank {rank} waits for rank", "given up in an earlier call"):
            dist.all_reduce(torch.ones(1), group=group)
    assert time.monotonic() - began < TIMEOUT_S / 2
    dist.barrier()


@case
def a_monitored_barrier_names_who_is_missing(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    limit = timedelta(seconds=0.3)
    if rank == 0:
        with one_sentence(RankLate, "Ranks 1, 2 failed to pass monitoredBarrier", "0.3 s"):
            group.monitored_barrier(limit, wait_all_ranks=True)
    dist.barrier()
    if rank != 1:
        with one_sentence(RankLate, f"Rank {rank} timed out in monitoredBarrier", "Rank 1 failed to pass"):
            group.monitored_barrier(limit)
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=TIMEOUT_S))
    still_together(ranks, group)


@case
def a_late_rank_is_one_sentence(rank: int, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=1))
    if rank == 0:
        began = time.monotonic()
        with one_sentence(RankLate, "rank 0", "all_reduce", "rank 1, 2"):
            dist.all_reduce(torch.ones(4), group=group)
        assert time.monotonic() - began < TIMEOUT_S / 2
        with one_sentence(RankLate, "rank 0", "recv", "rank 2"):
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
    with one_sentence(RankDied, f"rank {rank}", "rank 2", "whose process has ended"):
        dist.all_reduce(torch.ones(LONG))
    with one_sentence(RankDied, f"rank {rank}", "rank 2", "whose process has ended"):
        dist.recv(torch.ones(1), src=2, group=group)
    assert time.monotonic() - began < TIMEOUT_S / 2
