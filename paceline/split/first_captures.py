"""Of the devices of a replica the first captures a graph that can be kept; the others wait until it is, and find it.

To capture a graph each process would load torch's compiler and have it follow the same loss, all at the same moment and
often with fewer cores than devices. What cannot be kept all capture at once, and so do they if the first could not.

    first     is it there? ── tells whether it captures ── capture, proof, keep ── tells ──▶
    others    ── waits ────────▶ ─────────────────────────────────────── waits ──▶ is it there?
"""

from __future__ import annotations

from types import TracebackType

import torch

from paceline.exchange.mailboxes import Peers


class FirstCaptures:
    """To be entered by all devices of a replica, around looking for a graph and keeping it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._begun = self._waited_for = False

    def __enter__(self) -> FirstCaptures:
        if self._peers.rank != 0 and self._hear():
            self._hear()
        return self

    def begin(self, will_be_kept: bool) -> None:
        """Nothing was found, and so this device captures now."""
        if self._peers.rank == 0:
            self._begun, self._waited_for = True, will_be_kept and self._peers.first
            self._tell(self._waited_for)

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._peers.rank == 0 and (self._waited_for or not self._begun):
            self._tell(False)  # whatever came of it: the others see for themselves

    def _tell(self, waits: bool) -> None:
        for other in range(1, self._peers.count):
            self._peers.send(torch.tensor([waits]), other)

    def _hear(self) -> bool:
        return bool(self._peers.receive(0))
