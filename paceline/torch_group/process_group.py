"""A `torch.distributed.ProcessGroup` on shared memory, for the processes of one host.

torch's own DistributedDataParallel, DTensor, FSDP and pipelining run on it: collectives through a `Space`, sends and
receives through `TaggedMessages`. A collective is finished when its call returns; `async_op=True` gives
a work that is done.

Tensors may lie as they like in memory: what is not contiguous is copied both ways.
"""

# Only the forms in which torch.distributed itself calls are there; the others of the base class are conveniences.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import Store

from paceline.errors import PacelineError
from paceline.torch_group.flat import Flat, Flats, check, read, reduction, same_size
from paceline.torch_group.rank_group import RankGroup
from paceline.torch_group.space import Space, space_bytes
from paceline.torch_group.tagged_messages import Receive, TaggedMessages, letters_bytes

NAME = "paceline"

Tensors = list[torch.Tensor]


class SharedMemoryGroup(dist.ProcessGroup):
    """The ranks of a group, all on one host."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub has only the form with a store
        self._rank, self._size = rank, size
        self._name = self._description = ""
        sizes = (space_bytes(size), letters_bytes(size))
        self._company = RankGroup(store, rank, size, timeout.total_seconds(), sizes)
        self._space = Space(self._company, 0)
        self._letters = TaggedMessages(self._company, 1)
        self._company.meanwhile = self._letters.take_in

    # ── what torch asks of every group ───────────────────────────────────────────────────────────────────

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    # The base class would ask its backends for these, and it has none.
    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing is put off: every collective is finished when it returns."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return _Done([])

    def set_timeout(self, timeout: timedelta) -> None:
        self._company.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Nothing is open: the memory goes with the last view of it."""

    abort = shutdown

    # ── reductions ───────────────────────────────────────────────────────────────────────────────────────

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        reduce = reduction(getattr(opts, "reduceOp", ReduceOp.SUM), tensors)
        for tensor in tensors:
            with Flat(tensor) as flat:
                self._space.all_reduce(flat, reduce)
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        reduce = reduction(opts.reduceOp, tensors)
        for tensor in tensors:
            with Flat(tensor) as flat:
                self._space.reduce(flat, opts.rootRank, reduce)
        return _Done(tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, parts, opts)
        return _Done(outputs)

    def _reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], opts: Any) -> None:
        reduce = reduction(getattr(opts, "reduceOp", ReduceOp.SUM), [output, *parts])
        same_size("reduce_scatter", output, parts[self._rank])
        with Flat(output) as flat:
            self._space.reduce_scatter([read(part) for part in parts], flat, reduce)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        self._reduce_scatter(output, self._parts(read(input), "reduce_scatter_tensor"), opts)
        return _Done([output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return _Done(outputs)

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        for into, tensor in zip(outputs, inputs, strict=True):
            check([tensor, *into])
            same_size("all_gather", into[self._rank], tensor)
            with Flats(into) as flats:
                self._space.all_gather(read(tensor), flats)
        return _Done([tensor for into in outputs for tensor in into])

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)  # type: ignore[arg-type]

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        check([output, input])
        with Flat(output) as flat:
            parts = self._parts(flat, "all_gather_into_tensor")
            same_size("all_gather_into_tensor", parts[self._rank], input)
            self._space.all_gather(read(input), parts)
        return _Done([output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor, opts)
        return _Done(outputs)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        check(tensors)
        for tensor in tensors:
            with Flat(tensor) as flat:
                self._space.broadcast(flat, opts.rootRank)
        return _Done(tensors)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work:
        (output,) = outputs
        parts = inputs[0] if self._rank == opts.rootRank else []
        check([output, *parts])
        for part in parts:
            same_size("scatter", output, part)
        with Flat(output) as flat:
            self._space.scatter([read(part) for part in parts], flat, opts.rootRank)
        return _Done(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        (tensor,) = inputs
        into = outputs[0] if self._rank == opts.rootRank else []
        check([tensor, *into])
        for there in into:
            same_size("gather", there, tensor)
        with Flats(into) as flats:
            self._space.gather(read(tensor), flats, opts.rootRank)
        return _Done(into)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        check([*outputs, *inputs])
        with Flats(outputs) as flats:
            self._space.all_to_all([read(tensor) for tensor in inputs], flats)
        return _Done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        check([output, input])
        with Flat(output) as flat:
            parts = self._split(read(input), input, input_split_sizes, "the input")
            self._space.all_to_all(parts, self._split(flat, output, output_split_sizes, "the output"))
        return _Done([output])

    def barrier(self, opts: Any = None) -> Work:
        self._space.barrier()
        return _Done([])

    # ── one to one ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        check(tensors)
        for tensor in tensors:
            self._letters.post(read(tensor).view(torch.uint8), to, tag)
        return _Done(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        check(tensors)
        (tensor,) = tensors
        return _Receiving(self._letters, tensor, source, tag)

    # Names of earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ── parts of a tensor ────────────────────────────────────────────────────────────────────────────────

    def _parts(self, flat: torch.Tensor, call: str) -> Sequence[torch.Tensor]:
        if flat.numel() % self._size:
            raise PacelineError(f"{call} has a tensor of {flat.numel()} elements: {self._size} ranks must divide it")
        return list(flat.view(self._size, -1))

    def _split(
        self, flat: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int] | None, what: str
    ) -> Sequence[torch.Tensor]:
        """By rows of its first dim."""
        if not sizes:
            return self._parts(flat, "all_to_all_single")
        if len(sizes) != self._size or sum(sizes) != tensor.size(0):
            raise PacelineError(
                f"all_to_all_single splits {what} of {tensor.size(0)} rows into {list(sizes)}: "
                f"give {self._size} sizes that add up to the rows"
            )
        row = tensor[0].numel() if tensor.size(0) else 0
        return torch.split(flat, [size * row for size in sizes])

    def __repr__(self) -> str:
        return f"<{NAME} process group {self._name!r}: rank {self._rank} of {self._size}>"


# ── works ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Done(Work):
    """Of a call that was finished when it returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Tensors:
        return self._tensors

    def get_future(self) -> Any:
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Receiving(_Done):
    """Of a receive, which is done when somebody waits."""

    def __init__(self, letters: TaggedMessages, tensor: torch.Tensor, source: int | None, tag: int) -> None:
        super().__init__([tensor])
        self._letters = letters
        self._flat = Flat(tensor)
        self._receive = Receive(self._flat.flat.view(torch.uint8), source, tag)
        letters.ask(self._receive)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._letters.complete(self._receive)
        self._flat.write_back()
        return True

    def is_completed(self) -> bool:
        self._letters.take_in()
        return self._receive.complete

    is_success = is_completed

    def source_rank(self) -> int:
        assert self._receive.source is not None
        return self._receive.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        self.wait()
        return super().get_future()
