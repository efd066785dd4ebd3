"""Between hosts: the owners of the same shard, one on each, talk to each other through torch.distributed.

Inside a host shared memory has already summed all replicas, and every owner has a link of its own, so each byte of
a gradient crosses a host's link once, however many replicas the host has. What is sent, and what becomes of it, is said
in `coded_sums.py`. The backend is chosen by the device: Gloo for CPU memory, NCCL for GPUs.
"""

from __future__ import annotations

import ctypes
import functools
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import ReplicaDied
from paceline.exchange.coded_sums import Round
from paceline.net.secure import is_loopback
from paceline.torch_private import gloo_group, nccl_group

__all__ = ["LinkLost", "Links", "Store", "open_store", "serve_store"]


LOOK_EVERY = timedelta(milliseconds=250)  # while others are waited for
_NEVER_SENT = (1 << 30) + 1  # tag of a message that nobody sends


class LinkLost(ReplicaDied):
    """Another host is gone, or the way to it."""


class Links:
    """This owner's connections to the owners of the same shard on the other hosts."""

    def __init__(
        self,
        store: Store,
        name: str,
        host: int,
        hosts: int,
        timeout_s: float,
        device: torch.device,
        address: str | None = None,
    ) -> None:
        """`address`: of this machine, at which the other hosts reach it, if it is known."""
        self._address = address
        self.host = host
        self.hosts = hosts
        self._device = device
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        # Two groups, because small sums of the model's forward and the bulk of the gradients travel at the same time.
        # And a third for what is no step: sums of a step and of another call must not meet, Gloo would end the process.
        self._open = _OpenGroups()
        self._open.groups = [self._connect(f"{name}/{what}") for what in ("small", "bulk", "calls")]
        weakref.finalize(self, self._open.close)
        self.look: Callable[[], None] = lambda: None  # while this host waits for others

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
            return gloo_group(store, self.host, self.hosts, self._timeout, self._address)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            raise LinkLost(
                f"host {self.host} lost its link to another host ({first_line(error)}): see that host's output"
            ) from error

    def abort(self) -> None:
        """Ends all that is under way, here and, since connections are closed, on the other hosts."""
        for group in self._open.groups:
            give_up(group, (self.host + 1) % self.hosts, self._device)

    def sum(self, values: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The sum over all hosts of a few numbers, uncoded. All owners of this link call it."""
        total = values.to(self._device, copy=True).contiguous()
        with self._explained():
            work = (group or self._small).allreduce([total])
            self._open.begun(work)
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

    def tell(self, lane: int, what: str) -> None:
        """Has the same lane of the other hosts know something, which takes the place of what was told before."""
        with self._explained():
            self._store.set(f"told/{lane}/{self.host}", what)

    def told(self, lane: int) -> list[tuple[int, str]]:
        """Returns what the same lane of the other hosts has told, by host."""
        keys = {host: f"told/{lane}/{host}" for host in range(self.hosts) if host != self.host}
        with self._explained():
            return [(host, self._store.get(key).decode()) for host, key in keys.items() if self._store.check([key])]

    def sum_in_turn(self, values: torch.Tensor) -> torch.Tensor:
        """The same between the sums of gradients, by whoever makes those."""
        return self.sum(values, self._bulk)

    def exchange(self, one_round: Round, tag: int) -> None:
        """Sends and receives all messages of a round. Threads may be at different ones, each with a tag of its own."""
        with self._explained(), self._open.exchanging():
            if self._device.type == "cuda":
                self._bulk.alltoall(one_round.received, one_round.sent).wait()
                return
            # Gloo's own all-to-all and all-gather keep only one direction of a link busy at a time; sends and receives
            # that are all under way at once fill both. NCCL's are fine, and its sends would have to be grouped.
            others = [host for host in range(self.hosts) if host != self.host]
            received = {other: _bytes(one_round.received[other]) for other in others}
            sent = {other: _bytes(one_round.sent[other]) for other in others}
            under_way = [self._bulk.recv([into], other, tag) for other, into in received.items() if into.numel()]
            under_way += [self._bulk.send([message], other, tag) for other, message in sent.items() if message.numel()]
            for work in under_way:
                work.wait()


def give_up(group: Any, other: int, device: torch.device | None = None) -> None:
    """Ends all that is under way in a group, in which `other` is another rank, by closing its connections."""
    # Gloo has no way to do that. But a receive whose time runs out closes all connections of its group.
    with suppress(RuntimeError):
        group.recv([torch.empty(1, device=device)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))


class _OpenGroups:
    """Process groups, and what is under way in them. They are closed before Python ends.

    A group's threads let go of tensors when a sum is complete, a moment after whoever waited for it has gone on. If
    Python is about to end just then, that moment aborts the process: to close a group is to wait for its threads. Where
    a sum has not come to its end, because another host is gone, they would wait for it as well, and nobody waits for
    them: such a group is never closed.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self._lock = threading.Lock()
        self._sums: list[Any] = []  # those that were not complete when the last began
        self._exchanges = 0  # under way

    def begun(self, sum_under_way: Any) -> None:
        with self._lock:
            self._sums = [*(work for work in self._sums if not work.is_completed()), sum_under_way]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        with self._lock:
            self._exchanges += 1
        try:
            yield
        finally:
            with self._lock:
                self._exchanges -= 1

    def close(self) -> None:
        if self._exchanges or not all(work.is_completed() for work in self._sums):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.groups))
        else:
            self._sums.clear()  # each has a hold of its group
            self.groups.clear()


def _bytes(message: torch.Tensor) -> torch.Tensor:
    """Returns a message as bytes: of some types torch.distributed sends none."""
    return message.view(torch.uint8) if message.numel() else message


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
        raise ReplicaDied(f"nobody answers at {rendezvous} ({first_line(error)}): start host 0 first") from error
    return PrefixStore("paceline", store)


def serve_store(address: str) -> str:
    """Serves a store at a free port of this address, to the end of this process; returns both."""
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{_serve(address, 0).port}"


@functools.cache
def _serve(address: str, port: int) -> TCPStore:
    """Serves a store, from now on to the end of this process: when one trainer here is done with it, others elsewhere
    may already have come to it for the next."""
    listening = _listen_here(address, port)
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)


def _listen_here(address: str, port: int) -> int | None:
    """The descriptor of a listening socket for a store at a free port, or one that only this machine has to reach: by
    itself it would listen on every interface. None for other stores."""
    if port and not is_loopback(address):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise ReplicaDied(
            f"the store cannot listen at {address}:{port} ({error.strerror}): give another port"
        ) from error


def first_line(error: BaseException) -> str:
    """Returns what an error says first, for a sentence of ours."""
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
