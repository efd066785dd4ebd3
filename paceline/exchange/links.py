"""Between hosts: the owners of the same shard, one on each, add up their sums through torch.distributed.

Inside a host shared memory has already summed all replicas, and every owner has a link of its own, so each byte of
a gradient crosses a host's link once, however many replicas the host has. Over H hosts an owner's range is cut into
H parts; each is sent to the host that sums it, and comes back summed:

    host 0   │ part 0 │ part 1 │ ──all to all──▶ sums part 0 ──all gather──▶ │ part 0 │ part 1 │
    host 1   │ part 0 │ part 1 │ ──────────────▶ sums part 1 ──────────────▶ │ part 0 │ part 1 │

What crosses is coded by the wire; sums are float32. Every host decodes the same bytes, so all have the same bits.
The backend is chosen by the device: Gloo for CPU memory, NCCL for GPUs.
"""

from __future__ import annotations

import functools
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import ReplicaDied
from paceline.exchange.wire import Feedback, Wire
from paceline.net.secure import is_loopback
from paceline.torch_private import nccl_group

__all__ = ["Links", "Store", "open_store"]


LOOK_EVERY = timedelta(milliseconds=250)  # while others are waited for


class Links:
    """This owner's connections to the owners of the same shard on the other hosts."""

    def __init__(
        self, store: Store, name: str, host: int, hosts: int, wire: Wire, timeout_s: float, device: torch.device
    ) -> None:
        self.host = host
        self.hosts = hosts
        self._wire = wire
        self._device = device
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        # Two groups, because small sums of the model's forward and the bulk of the gradients travel at the same time.
        # And a third for what is no step: sums of a step and of another call must not meet, Gloo would end the process.
        self._open = _OpenGroups()
        self._open.groups = [self._connect(f"{name}/{what}") for what in ("small", "bulk", "calls")]
        weakref.finalize(self, self._open.close)
        self.look: Callable[[], None] = lambda: None  # while this host waits for others
        self._ranges: dict[int, _Range] = {}

    @property
    def _small(self) -> Any:
        return self._open.groups[0]

    @property
    def _bulk(self) -> Any:
        return self._open.groups[1]

    @property
    def _calls(self) -> Any:
        return self._open.groups[2]

    def _connect(self, name: str) -> Any:
        store = PrefixStore(name, self._store)
        with self._explained():
            if self._device.type == "cuda":
                return nccl_group(store, self.host, self.hosts, self._timeout)
            return ProcessGroupGloo(store, self.host, self.hosts, self._timeout)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        self._open.under_way.add(call := object())
        try:
            yield
            self._open.under_way.discard(call)
        except (RuntimeError, dist.DistError) as error:
            raise ReplicaDied(
                f"host {self.host} lost its link to another host ({_first_line(error)}): see that host's output"
            ) from error

    def sum(self, values: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The sum over all hosts of a few numbers, uncoded. All owners of this link call it."""
        total = values.to(self._device, copy=True).contiguous()
        with self._explained():
            work = (group or self._small).allreduce([total])
            while not self._is_done(work):
                self.look()
        return total.to(values.device)

    def _is_done(self, work: Any) -> bool:
        """Waits for a moment; of a GPU until it is."""
        try:
            work.wait(*() if self._device.type == "cuda" else (LOOK_EVERY,))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it was completed just then: this returns, or raises what really went wrong
        return True

    def sum_in_call(self, values: torch.Tensor) -> torch.Tensor:
        """The same in what is no step."""
        return self.sum(values, self._calls)

    def tell(self, row: int, what: str) -> None:
        """Has the same row of the other hosts know something, which takes the place of what was told before."""
        self._store.set(f"told/{row}/{self.host}", what)

    def told(self, row: int) -> Iterator[tuple[int, str]]:
        """Returns what the same row of the other hosts has told, by host."""
        for host in range(self.hosts):
            if host != self.host and self._store.check([key := f"told/{row}/{host}"]):
                yield host, self._store.get(key).decode()

    def sum_in_turn(self, values: torch.Tensor) -> torch.Tensor:
        """The same between the sums of gradients, by whoever makes those."""
        return self.sum(values, self._bulk)

    def sum_values(self, key: int, values: torch.Tensor) -> None:
        """Replace 1-D `values` of any float type by their sum over all hosts; `key` names them from step to step."""
        if values.dtype is torch.float32:
            self._sum_range(key, values)
        elif values.dtype.itemsize < 4:
            wide = values.float()
            self._sum_range(key, wide)
            values.copy_(wide)
        else:
            values.copy_(self.sum(values, self._bulk))

    def _sum_range(self, key: int, values: torch.Tensor) -> None:
        if key not in self._ranges:
            self._ranges[key] = _Range(values, self.host, self.hosts, self._wire)
        coding = self._ranges[key]
        with self._explained():
            coding.encode_parts(values)
            self._all_to_all(coding.received, coding.sent)
            coding.sum_own_part(values)
            self._all_gather(coding.gathered, coding.own_sum)
            coding.decode_sums(values)

    # Gloo's own all-to-all and all-gather keep only one direction of a link busy at a time; sends and receives that are
    # all under way at once fill both. NCCL's are fine, and its sends would have to be grouped.

    def _all_to_all(self, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        if self._device.type == "cuda":
            self._bulk.alltoall(received, sent).wait()
        else:
            self._exchange(received, sent)

    def _all_gather(self, gathered: list[torch.Tensor], own: torch.Tensor) -> None:
        if self._device.type == "cuda":
            self._bulk.allgather([gathered], [own]).wait()
        else:
            gathered[self.host].copy_(own)
            self._exchange(gathered, [own] * self.hosts)

    def _exchange(self, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        others = [host for host in range(self.hosts) if host != self.host]
        under_way = [self._bulk.recv([received[other]], other, 0) for other in others]
        under_way += [self._bulk.send([sent[other]], other, 0) for other in others]
        for work in under_way:
            work.wait()

    def commit(self) -> None:
        """The step was accepted: what lossy coding has lost is carried into the next one."""
        for coding in self._ranges.values():
            for feedback in coding.feedback.values():
                feedback.commit()


class _OpenGroups:
    """Process groups, and what is under way in them. They are closed before Python ends.

    A group's threads let go of tensors when a sum is complete, a moment after whoever waited for it has gone on. If
    Python is about to end just then, that moment aborts the process: to close a group is to wait for its threads. Where
    a sum has not come to its end, because another host is gone, they would wait for it as well, and nobody waits for
    them.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.under_way: set[object] = set()

    def close(self) -> None:
        if not self.under_way:
            self.groups.clear()


class _Range:
    """Buffers of one range, and the residuals if its wire loses something."""

    def __init__(self, values: torch.Tensor, host: int, hosts: int, wire: Wire) -> None:
        elements = values.numel()
        block = wire.block
        self._part = -(-elements // (hosts * block)) * block  # all parts equal; the last ones may be padded
        self._host, self._hosts, self._wire = host, hosts, wire
        coded = wire.encoded_bytes(self._part)

        def space(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.uint8, device=values.device)

        self.own_sum = space(coded)
        self.sent, self.received, self.gathered = ([space(coded) for _ in range(hosts)] for _ in range(3))
        self.feedback: dict[int, Feedback] = {}
        if wire.lossy:  # the key `host` is for the sum that this host sends out
            self.feedback = {part: Feedback(self._size(elements, part), wire) for part in range(hosts)}

    def _size(self, elements: int, part: int) -> int:
        return max(0, min(self._part, elements - part * self._part))

    def _parts(self, values: torch.Tensor) -> list[torch.Tensor]:
        start = [part * self._part for part in range(self._hosts)]
        return [values[at : at + self._size(values.numel(), k)] for k, at in enumerate(start)]

    def _encode(self, key: int, values: torch.Tensor, out: torch.Tensor) -> None:
        out = out[: self._wire.encoded_bytes(values.numel())]
        if self.feedback:
            self.feedback[key].encode(values, out)
        else:
            self._wire.encode(values, out)

    def encode_parts(self, values: torch.Tensor) -> None:
        for part, part_values in enumerate(self._parts(values)):
            if part != self._host:
                self._encode(part, part_values, self.sent[part])

    def sum_own_part(self, values: torch.Tensor) -> None:
        """Add up this host's part in the order of the hosts; its own share has never been coded."""
        own = self._parts(values)[self._host]
        size = self._wire.encoded_bytes(own.numel())
        for other in range(self._hosts):
            if other != self._host:
                self._wire.decode_add(self.received[other][:size], own)
        self._encode(self._host, own, self.own_sum)

    def decode_sums(self, values: torch.Tensor) -> None:
        for part, part_values in enumerate(self._parts(values)):
            # Its own part too: all hosts must hold the same bits.
            coded = self.gathered[part][: self._wire.encoded_bytes(part_values.numel())]
            self._wire.decode(coded, part_values)


def open_store(rendezvous: str, *, serve: bool, timeout_s: float) -> Store:
    """The key-value store by which processes of several hosts find each other."""
    address, _, port = rendezvous.rpartition(":")
    address = address.strip("[]")
    try:
        if serve:
            _serve(address, int(port))
        store = TCPStore(
            address, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, dist.DistError) as error:
        raise ReplicaDied(f"nobody answers at {rendezvous} ({_first_line(error)}): start host 0 first") from error
    return PrefixStore("paceline", store)


@functools.cache
def _serve(address: str, port: int) -> Store:
    """Serves a store, from now on to the end of this process: when one trainer here is done with it, others elsewhere
    may already have come to it for the next."""
    listening = _listen_here(address, port)
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def _listen_here(address: str, port: int) -> int | None:
    """The descriptor of a listening socket for a store that only this machine has to reach: by itself it would listen
    on every interface. None for other stores."""
    if not is_loopback(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise ReplicaDied(
            f"the store cannot listen at {address}:{port} ({error.strerror}): give another port"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
