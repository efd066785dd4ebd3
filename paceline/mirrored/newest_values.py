"""What other hosts have newer values of, asked for by one process alone, at any time between two steps.

Every device has a thread that answers. It can, whatever its process does meanwhile: the next step is made by all or not
at all, so until whoever asks has come to it nobody changes anything. Only the step before may not be complete yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from paceline.errors import ReplicaDied, Stalled
from paceline.exchange.far_mailboxes import FarMailboxes
from paceline.exchange.mailboxes import in_pieces

_LOOK_EVERY_S = 0.25
_QUESTION, _ANSWER = 0, 1


class NewestValues:
    """One device's side: asks others, and answers them."""

    def __init__(
        self, mail: FarMailboxes, closed: Callable[[], int], give: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """`mail` is used for nothing else. `closed` returns the last step that is complete on this host, and `give`
        what this host has the newest values of."""
        self._mail, self._closed, self._give = mail, closed, give
        self._coming: dict[int, int] = {}  # by device: how many tensors of an answer are still to come
        self._answers: dict[int, list[torch.Tensor]] = {}
        self._complete: SimpleQueue[tuple[int, list[torch.Tensor]]] = SimpleQueue()
        self._ends = False
        self._thread = threading.Thread(target=self._answer_all, name="paceline-newest-values", daemon=True)
        self._thread.start()

    def ask(self, devices: Sequence[int], step: int, timeout_s: float) -> dict[int, list[torch.Tensor]]:
        """Returns what these devices' hosts give after that step."""
        for device in devices:
            self._post(device, torch.tensor([_QUESTION, step]))
        found: dict[int, list[torch.Tensor]] = {}
        until = time.monotonic() + timeout_s
        while len(found) < len(devices):
            try:
                device, values = self._complete.get(timeout=_LOOK_EVERY_S)
                found[device] = values
            except Empty:
                missing = next(device for device in devices if device not in found)
                if (lost := self._mail.lost(missing)) is not None:
                    raise ReplicaDied(f"a prediction needs parameters of {lost}") from None
                if time.monotonic() > until:
                    waited = f"a prediction has waited {timeout_s:g} s for parameters of device {missing}"
                    raise Stalled(waited) from None
        return found

    def close(self) -> None:
        """Answers nobody any more."""
        self._ends = True
        self._mail.wake()
        self._thread.join()
        self._mail.close()

    def _answer_all(self) -> None:
        asked: list[tuple[int, int]] = []  # device, step
        while not self._ends:
            for device, box in self._mail.into.items():
                while (message := box.next()) is not None:
                    self._take(device, message, asked)
            closed = self._closed()
            for device, step in [*asked]:
                if closed >= step:
                    asked.remove((device, step))
                    self._answer(device)
            self._mail.pause(0.002 if asked else _LOOK_EVERY_S)

    def _take(self, device: int, message: torch.Tensor, asked: list[tuple[int, int]]) -> None:
        if device in self._coming:
            self._answers[device].append(message)
            self._coming[device] -= 1
        else:
            kind, number = message.tolist()
            if kind == _QUESTION:
                asked.append((device, number))
                return
            self._coming[device], self._answers[device] = number, []
        if not self._coming[device]:
            del self._coming[device]
            self._complete.put((device, self._answers.pop(device)))

    def _answer(self, device: int) -> None:
        values = self._give()
        self._post(device, torch.tensor([_ANSWER, len(values)]))
        for value in values:
            self._post(device, value)

    def _post(self, device: int, tensor: torch.Tensor) -> None:
        for piece in in_pieces(tensor):
            while not self._mail.out[device].post(piece, tensor):
                if self._ends or self._mail.lost(device) is not None:
                    return
                self._mail.pause(_LOOK_EVERY_S)
