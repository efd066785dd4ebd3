"""What other hosts have newer values of, asked for by one process alone, at any time between two steps.

Every device has a thread that asks and answers. It can answer, whatever its process does meanwhile: the next step is
made by all or not at all, so until whoever asks has come to it nobody changes anything. Only the step before may not be
complete yet. A question has a number, which comes back with the answer: one that nobody waits for any more is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from paceline.errors import ReplicaDied, Stalled
from paceline.exchange.far_mailboxes import FarMailboxes
from paceline.exchange.mailboxes import in_pieces

_LOOK_EVERY_S = 0.25
_LOOK_AT_STEP_EVERY_S = 0.002
_QUESTION, _ANSWER = 0, 1


@dataclass
class _Answer:
    """Of one device, as it comes in."""

    number: int
    missing: int  # tensors
    values: list[torch.Tensor]


class NewestValues:
    """One device's side: asks others, and answers them."""

    def __init__(
        self, mail: FarMailboxes, closed: Callable[[], int], give: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """`mail` is used for nothing else. `closed` returns the last step that is complete on this host, and `give`
        what this host has the newest values of."""
        self._mail, self._closed, self._give = mail, closed, give
        self._number = 0  # of the last question
        self._questions: SimpleQueue[tuple[int, Sequence[int], int]] = SimpleQueue()  # number, devices, step
        self._complete: SimpleQueue[tuple[int, _Answer]] = SimpleQueue()
        self._coming: dict[int, _Answer] = {}  # by device
        self._asked: list[tuple[int, int, int]] = []  # by others: device, number, step
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="paceline-newest-values", daemon=True)
        self._thread.start()

    def ask(self, devices: Sequence[int], step: int, timeout_s: float) -> dict[int, list[torch.Tensor]]:
        """Returns what these devices' hosts give after that step."""
        self._number += 1
        self._questions.put((self._number, devices, step))
        self._mail.wake()
        found: dict[int, list[torch.Tensor]] = {}
        until = time.monotonic() + timeout_s
        while missing := [device for device in devices if device not in found]:
            try:
                device, answer = self._complete.get(timeout=min(_LOOK_EVERY_S, max(0.0, until - time.monotonic())))
                if answer.number == self._number:
                    found[device] = answer.values
            except Empty:
                if (lost := self._mail.lost(missing[0])) is not None:
                    raise ReplicaDied(f"a prediction needs parameters of {lost}") from None
                if time.monotonic() >= until:
                    waited = f"a prediction has waited {timeout_s:g} s for parameters of device {missing[0]}"
                    raise Stalled(waited) from None
        return found

    def close(self) -> None:
        """Answers nobody any more."""
        self._ends = True
        self._mail.wake()
        self._thread.join()
        self._mail.close()

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        try:
            while not self._ends:
                self._ask_others()
                for device, box in self._mail.into.items():
                    while (message := box.next()) is not None:
                        self._take(device, message)
                self._answer_others()
                self._mail.pause(_LOOK_AT_STEP_EVERY_S if self._asked else _LOOK_EVERY_S)
        finally:
            self._mail.say_goodbye()  # whatever went wrong here: others learn at once that nobody answers

    def _ask_others(self) -> None:
        while not self._questions.empty():
            number, devices, step = self._questions.get()
            for device in devices:
                self._post(device, torch.tensor([_QUESTION, number, step]))

    def _take(self, device: int, message: torch.Tensor) -> None:
        answer = self._coming.get(device)
        if answer is not None:
            answer.values.append(message)
            answer.missing -= 1
        else:
            kind, number, about = message.tolist()
            if kind == _QUESTION:
                self._asked.append((device, number, about))
                return
            answer = self._coming[device] = _Answer(number, about, [])
        if not answer.missing:
            del self._coming[device]
            self._complete.put((device, answer))

    def _answer_others(self) -> None:
        closed = self._closed()
        now = [asked for asked in self._asked if asked[2] <= closed]
        self._asked = [asked for asked in self._asked if asked[2] > closed]
        for device, number, _ in now:
            values = self._give()
            self._post(device, torch.tensor([_ANSWER, number, len(values)]))
            for value in values:
                self._post(device, value)

    def _post(self, device: int, tensor: torch.Tensor) -> None:
        for piece in in_pieces(tensor):
            while not self._mail.out[device].post(piece, tensor):
                if self._ends or self._mail.lost(device) is not None:
                    return
                self._mail.pause(_LOOK_EVERY_S)
