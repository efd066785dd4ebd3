"""A `torch.distributed.ProcessGroup` on shared memory, for the processes of one host.

torch's own DistributedDataParallel, DTensor, FSDP and pipelining run on it: collectives through `Collectives`, sends
and receives through `TaggedMessages`. A collective is finished when its call returns; `async_op=True` gives a work that
is done.

Tensors may lie as they like in memory: what is not contiguous is copied both ways. What cannot be is refused before
anything is exchanged, and the other ranks are told.
"""

# Only the forms in which torch.distributed itself calls are there; the others of the base class are conveniences.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import Store

from paceline.torch_group.collectives import Collectives
from paceline.torch_group.flat_tensors import (
    FlatTensor,
    FlatTensors,
    check,
    equal_parts,
    one_for_each,
    read,
    same_size,
    split,
)
from paceline.torch_group.rank_group import RankGroup
from paceline.torch_group.reductions import reduction
from paceline.torch_group.rounds import space_bytes
from paceline.torch_group.sparse import all_reduce_sparse
from paceline.torch_group.tagged_messages import TaggedMessages, messages_bytes
from paceline.torch_group.works import Finished, Receiving, seconds

NAME = "paceline"

Tensors = list[torch.Tensor]
Call = Callable[..., Work]


def _collective(call: Call) -> Call:
    """A call that all ranks make: within the time limit of its options, and the others are told where it fails."""

    @functools.wraps(call)
    def told(self: SharedMemoryGroup, *args: Any, **kwargs: Any) -> Work:
        collectives = self._collectives
        opts = kwargs.get("opts", args[-1] if args else None)
        with self._one_at_a_time:
            collectives.limit_s = seconds(getattr(opts, "timeout", None))
            before = collectives.rounds
            try:
                return call(self, *args, **kwargs)
            except BaseException as error:
                collectives.failed(before, error)
                raise

    return told


class SharedMemoryGroup(dist.ProcessGroup):
    """The ranks of a group, all on one host."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub has only the form with a store
        self._rank, self._size = rank, size
        self._name = self._description = ""
        sizes = (space_bytes(size), messages_bytes(size))
        self._ranks = RankGroup(store, rank, size, timeout.total_seconds(), sizes)
        self._collectives = Collectives(self._ranks, 0)
        self._messages = TaggedMessages(self._ranks, 1)
        self._ranks.meanwhile = self._messages.take_in
        self._one_at_a_time = threading.RLock()  # of collectives, where threads of the rank call them

    # ── what torch asks of every group ───────────────────────────────────────────────────────────────────

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getRank, getSize, getBackendName = rank, size, name

    # The base class would ask its backends for these, and it has none.
    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing is put off: every collective is finished when it returns."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return Finished([])

    def set_timeout(self, timeout: timedelta) -> None:
        self._ranks.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Nothing is open: the memory goes with the last view of it."""

    abort = shutdown

    # ── reductions ───────────────────────────────────────────────────────────────────────────────────────

    @_collective
    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        op = getattr(opts, "reduceOp", ReduceOp.SUM)
        if tensors and tensors[0].layout != torch.strided:
            for tensor in tensors:
                all_reduce_sparse(self._collectives, tensor, op)
            return Finished(tensors)
        reduce = reduction(op, tensors)
        for tensor in tensors:
            with FlatTensor(tensor) as flat:
                self._collectives.all_reduce(flat, reduce)
        return Finished(tensors)

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        reduce = reduction(opts.reduceOp, tensors)
        for tensor in tensors:
            with FlatTensor(tensor) as flat:
                self._collectives.reduce(flat, opts.rootRank, reduce)
        return Finished(tensors)

    @_collective
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, parts, opts)
        return Finished(outputs)

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> None:
        one_for_each("reduce_scatter", parts, self._size)
        reduce = reduction(getattr(opts, "reduceOp", ReduceOp.SUM), [output, *parts])
        same_size("reduce_scatter", output, parts[self._rank])
        with FlatTensor(output) as flat:
            self._collectives.reduce_scatter([read(part) for part in parts], flat, reduce)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        check([*outputs, *inputs])
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, equal_parts("reduce_scatter_tensor", read(tensor), self._size), opts)
        return Finished(outputs)

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────

    @_collective
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        for into, tensor in zip(outputs, inputs, strict=True):
            self._all_gather(into, tensor)
        return Finished([tensor for into in outputs for tensor in into])

    @_collective
    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """`outputs` has a list for each rank, of one tensor for each input."""
        for tensor, *into in zip(inputs, *outputs, strict=True):
            self._all_gather(into, tensor)
        return Finished([tensor for into in outputs for tensor in into])

    def _all_gather(self, into: Tensors, tensor: torch.Tensor) -> None:
        one_for_each("all_gather", into, self._size)
        check([tensor, *into])
        same_size("all_gather", into[self._rank], tensor)
        with FlatTensors(into) as flats:
            self._collectives.all_gather(read(tensor), flats)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    @_collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            check([output, tensor])
            with FlatTensor(output) as flat:
                parts = equal_parts("all_gather_into_tensor", flat, self._size)
                same_size("all_gather_into_tensor", parts[self._rank], tensor)
                self._collectives.all_gather(read(tensor), parts)
        return Finished(outputs)

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        check(tensors)
        for tensor in tensors:
            with FlatTensor(tensor) as flat:
                self._collectives.broadcast(flat, opts.rootRank)
        return Finished(tensors)

    @_collective
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        (output,) = outputs
        parts = []
        if self._rank == opts.rootRank:
            (parts,) = inputs
            one_for_each("scatter", parts, self._size)
        check([output, *parts])
        for part in parts:
            same_size("scatter", output, part)
        with FlatTensor(output) as flat:
            self._collectives.scatter([read(part) for part in parts], flat, opts.rootRank)
        return Finished(outputs)

    @_collective
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        (tensor,) = inputs
        into = []
        if self._rank == opts.rootRank:
            (into,) = outputs
            one_for_each("gather", into, self._size)
        check([tensor, *into])
        for there in into:
            same_size("gather", there, tensor)
        with FlatTensors(into) as flats:
            self._collectives.gather(read(tensor), flats, opts.rootRank)
        return Finished(into)

    @_collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for tensors in (outputs, inputs):
            one_for_each("all_to_all", tensors, self._size)
        check([*outputs, *inputs])
        with FlatTensors(outputs) as flats:
            self._collectives.all_to_all([read(tensor) for tensor in inputs], flats)
        return Finished(outputs)

    @_collective
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        check([output, input])
        with FlatTensor(output) as flat:
            parts = split("all_to_all_single", read(input), input, input_split_sizes, self._size)
            into = split("all_to_all_single", flat, output, output_split_sizes, self._size)
            self._collectives.all_to_all(parts, into)
        return Finished([output])

    @_collective
    def barrier(self, opts: Any = None) -> Work:
        self._collectives.barrier()
        return Finished([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; an error on each that waits in vain names all that have not come."""
        limit_s = self._ranks.timeout_s if timeout is None else timeout.total_seconds()
        self._collectives.monitored_barrier(limit_s)

    # ── one to one ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        check(tensors)
        for tensor in tensors:
            self._messages.post(read(tensor), to, tag)
        return Finished(tensors)

    def recv(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        check(tensors)
        (tensor,) = tensors
        return Receiving(self._messages, tensor, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    # Names of earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def __repr__(self) -> str:
        return f"<{NAME} process group {self._name!r}: rank {self._rank} of {self._size}>"
