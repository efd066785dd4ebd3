"""Notices that a script writes to parameters between two steps, which are the servers'.

Where the model points at a replica's own copy (async rules, TCP, a parameter cut between servers), what is written
there is gone with the next pull: that is refused. Where it points at the memory of a server on the same host, what
every replica's script does is done once for each of them: nobody can tell whether that is right (a clamp) or wrong (a
scaling), so the user is told, once.

Looked at is the element in the middle of every parameter: as the script was handed it, and as it hands it back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from paceline.central.client.pulling import Pulls
from paceline.errors import PacelineError

_WRITTEN = "the script has written to parameter {!r} between two steps, and with servers it is theirs: "
_LOST = "this replica has only a copy of it, and what was written is lost; use mirrored replicas (no --servers)"
_SHARED = (
    "what it does there is done once for each replica, and is right only if it gives the same when it is done again; "
    "use pl.distribute, where each replica has its own"
)


class WrittenParameters:
    """Looks at the parameters of one replica when the script gets them, and when it gives them back."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], pulls: Pulls, replicas: int) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
        self._pulls = pulls
        self.scripts = replicas  # that run the same lines
        self._pointers: list[int] = []
        self._middles: list[torch.Tensor] = []  # views of bytes, as long as the parameters stay where they are
        self._left: tuple[object, list[bytes]] | None = None
        self._told = False

    def leave(self) -> None:
        """The script goes on: whatever changes from now on, the script has written."""
        mark = self._pulls.mark()
        self._left = (mark, self._now()) if mark is not None and not self._told else None

    def take(self) -> None:
        """The script has come back: what it has written is refused, or told."""
        left, self._left = self._left, None
        if left is None or left[1] == (now := self._now()) or self._pulls.mark() != left[0]:
            return
        name = next(name for name, was, new in zip(self._parameters, left[1], now, strict=True) if was != new)
        if not self._pulls.points_at_server(name):
            raise PacelineError(f"{_WRITTEN.format(name)}{_LOST}")
        if self.scripts > 1:
            self._told = True
            warnings.warn(f"{_WRITTEN.format(name)}{_SHARED}", stacklevel=2)

    def _now(self) -> list[bytes]:
        """Returns the elements in the middle as bytes: what is no number would not be equal to itself."""
        pointers = [parameter.data_ptr() for parameter in self._parameters.values()]
        if pointers != self._pointers:
            self._pointers = pointers
            flat = [parameter.detach().view(-1) for parameter in self._parameters.values()]
            self._middles = [one[len(one) // 2 :][:1].view(torch.uint8) for one in flat]
        return [middle.cpu().numpy().tobytes() for middle in self._middles]
