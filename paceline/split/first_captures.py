"""Of the devices of a replica the first captures and proves a graph that can be kept; the others wait, and find it.

To capture a graph each process would load torch's compiler and have it follow the same loss, all at the same moment and
often with fewer cores than devices; to prove one takes the memory of two whole gradients. What cannot be kept all
capture at once, and so do they if the first could not. Which entry the first has proven it tells, and the others prove
any other by themselves.

    first     is it there? ── tells whether it captures ── capture, proof, keep ── tells what is proven ──▶
    others    ── waits ────────▶ ────────────────────────────────────────────────────────── waits ──▶ is it there?
"""

from __future__ import annotations

from types import TracebackType

import torch

from paceline.exchange.mailboxes import Peers

_WAIT, _BY_YOURSELVES = "wait", "by yourselves"  # what is told instead of an entry


class FirstCaptures:
    """To be entered by all devices of a replica, around looking for a graph and keeping it. `proven`: the entry that
    the first has proven, to be set there before the end and read by the others."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._begun = self._waited_for = False
        self.proven = ""

    def __enter__(self) -> FirstCaptures:
        if self._peers.rank != 0:
            heard = self._hear()
            self.proven = self._hear() if heard == _WAIT else heard
        return self

    def begin(self, will_be_kept: bool) -> None:
        """Nothing was found, and so this device captures now."""
        if self._peers.rank == 0:
            self._begun, self._waited_for = True, will_be_kept and self._peers.first
            self._tell(_WAIT if self._waited_for else _BY_YOURSELVES)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._peers.rank == 0 and (self._waited_for or not self._begun):
            self._tell(self.proven or _BY_YOURSELVES)  # whatever came of it: the others see for themselves

    def _tell(self, words: str) -> None:
        for other in range(1, self._peers.count):
            self._peers.send(torch.tensor(list(words.encode()), dtype=torch.uint8), other)

    def _hear(self) -> str:
        return bytes(self._peers.receive(0).tolist()).decode()
