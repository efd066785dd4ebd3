"""One device of a predictor: its part of the model, and how it talks with the others.

    caller (device 0)   ring, request ──▶ its part of the forward ─────▶ answer
    device 1, …         … sleeps ─▶ wakes ─▶ its part of the forward ─▶ sleeps

Devices that fail in the middle of a request would leave the others waiting for them. So whoever fails says so in the
`RequestStatus`; everybody waiting looks there, gives up too, and all throw away what still lies in the mailboxes before
they go on with the next request.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError, ReplicaDied, Stalled
from paceline.exchange.board import Board
from paceline.exchange.life import Life
from paceline.exchange.mailboxes import Peers
from paceline.exchange.packing import CannotTravel, pack, receive, send
from paceline.exchange.words import Phase
from paceline.memory.arena import Arena
from paceline.serve.request_status import RequestStatus, StatusWord
from paceline.split.called_cut import CalledCut
from paceline.split.cut import Example, call_model, open_cut
from paceline.split.values import Split

LOOKS_BETWEEN_CHECKS = 32
AWAKE_S = 0.005  # after a request the next is looked for this long before a device sleeps


class RequestAbandoned(BaseException):
    """Is raised where another device has failed in this request. A model's own `except Exception` does not catch it."""


class ServingPeers(Peers):
    """Mailboxes whose waits end when somebody fails, or when the process that is waited for has ended."""

    def __init__(
        self, arena: Arena, board: Board, status: RequestStatus, rank: int, count: int, timeout_s: float
    ) -> None:
        super().__init__(arena, board, rank, rank, count, timeout_s)
        self._status = status
        self.lives: dict[int, Life] = {}  # of the other devices, as far as this one can tell
        self.request = 0
        self.awaited: list[int] = []  # the devices that this one waits for now

    def _wait(self, other: int, ready: Any) -> None:
        self.wait_for(lambda: [other], ready)

    def wait_for(self, others: Callable[[], list[int]], ready: Callable[[], bool], *, give_up: bool = True) -> None:
        """Waits until `ready()`. `others()` are those that it may lie with; with `give_up`, a failure anywhere ends
        it."""
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            if give_up and self.somebody_failed:
                raise RequestAbandoned
            dead = []
            if looks % LOOKS_BETWEEN_CHECKS == 0:
                dead = [device for device, life in self.lives.items() if not life]
            if ready():
                return True
            if dead:
                raise ReplicaDied(f"the process of device {dead[0]} has ended: a cut model needs all its devices")
            return False

        self.awaited = others()
        try:
            self._board.wait(self.rank, Phase.AWAITING_DEVICES, look, self._timeout_s)
            self.awaited = []
        except Stalled:
            late = ", ".join(map(str, others()))
            raise Stalled(f"device {self.rank} has waited {self._timeout_s:g} s for device {late}") from None

    @property
    def somebody_failed(self) -> bool:
        """Returns whether there is a failure that this device has not cleared away yet."""
        return self._status[StatusWord.FAILED] > self._status[StatusWord.STOPPED + self.rank]

    def clear(self) -> None:
        """Throws away what was on its way, with the request it was of. All devices call this after a failure."""
        self._meet(StatusWord.STOPPED, self._status[StatusWord.FAILED])
        # Everybody has stopped: no failure can be added, and nobody sends. One that had a failure of a later request
        # is still waiting for the others to have seen that one.
        failed = self._status[StatusWord.STOPPED + self.rank] = self._status[StatusWord.FAILED]
        for box in self._in.values():
            box.clear()
        self.request = self._status[StatusWord.REQUEST]
        self._meet(StatusWord.CLEARED, failed)

    def _meet(self, word: StatusWord, failed: int) -> None:
        """Says in this device's word that it has come so far with the failure, and waits until all have."""
        self._status[word + self.rank] = failed

        def missing() -> list[int]:
            return [device for device in range(self.count) if self._status[word + device] < failed]

        self.wait_for(missing, lambda: not missing(), give_up=False)


class Device:
    """One device, with its part of the model, which it cuts at the first request."""

    def __init__(
        self, model: nn.Module, split: Split, dims: Mapping[str, str], peers: ServingPeers, status: RequestStatus
    ) -> None:
        self._cut = CalledCut(open_cut(split, peers, dims), model)
        self._status = status
        self._at = StatusWord.PREPARED + peers.rank

    def answer(self, call: Example) -> Any:
        """Returns the model's answer. All devices call this with the same request, and each gets the answer."""
        with torch.no_grad():
            if not self._status[self._at]:
                self._prepare(call)
            return self._cut.call(call_model, call)

    def _prepare(self, call: Example) -> None:
        self._status[self._at] = -1
        self._cut.prepare(call_model, call)
        self._status[self._at] = 1


def work(device: Device, peers: ServingPeers, status: RequestStatus, bell: int) -> None:
    """Answers requests, on every device but the caller's, until the caller closes or is no more."""
    while _rung(bell, lambda: status[StatusWord.REQUEST] > peers.request or peers.somebody_failed):
        if status[StatusWord.REQUEST] > peers.request:
            peers.request += 1
            try:
                device.answer(receive(peers, 0)[0])
            except RequestAbandoned:
                pass
            except BaseException as error:
                status.fail(peers.request, peers.rank, described(error))
        if peers.somebody_failed:
            peers.clear()


def send_request(call: Example, peers: Peers) -> None:
    """The caller sends its request to all other devices."""
    try:
        packed = pack(call)
    except CannotTravel as what:
        raise PacelineError(
            f"a request has {what}: it may be made of tensors, numbers, text, None, lists, tuples and dicts"
        ) from None
    for device in range(1, peers.count):
        send(peers, packed, device)


def described(error: BaseException) -> str:
    """Returns an error as one sentence."""
    return str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"


def _rung(bell: int, asked: Callable[[], bool]) -> bool:
    """Waits until there is something to do, and returns True; False if the caller has closed its end, or has ended."""
    awake_until = time.monotonic() + AWAKE_S
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    while True:
        if asked():
            return True
        if time.monotonic() < awake_until:
            os.sched_yield()
            continue
        poll.poll()
        if not os.read(bell, 4096):
            return False
