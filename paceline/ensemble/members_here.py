"""Members of an ensemble in this process: a thread each, on a core or a device of its own.

torch lets go of Python's lock while it computes, so threads compute side by side. A member that is late is stopped
before its next operator. One that is in something else for long, a sleep say, is only passed over meanwhile: to really
stop such a one takes a process (`members_between.py`).
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.ensemble.placement import MemberDevice
from paceline.ensemble.question import CLOSED, Question, next_open
from paceline.optim.models import evaluating
from paceline.serve.answering import in_a_sentence
from paceline.stoppable_calls import CallGivenUp, StopBetweenOperators, around
from paceline.torch_private import tree_map_only

Answering = Callable[..., Any]
_LONGEST_END_S = 2.0


class MembersHere:
    """All members, each with a thread that answers its questions one after the other."""

    def __init__(self, members: Sequence[Answering], devices: Sequence[MemberDevice]) -> None:
        self._threads = [
            _MemberThread(number, member, device)
            for number, (member, device) in enumerate(zip(members, devices, strict=True))
        ]

    def ask(self, question: Question) -> None:
        """Hands the question to every member, and returns at once."""
        for thread in self._threads:
            thread.ask(question)

    def close(self) -> None:
        """Ends the threads, as far as they are not in the middle of something long."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join()


class _MemberThread:
    """One member: its questions, and the thread that answers them."""

    def __init__(self, number: int, member: Answering, device: MemberDevice) -> None:
        self._number, self._member, self._device = number, member, device
        self._waiting: collections.deque[Question] = collections.deque()
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"ensemble member {number}", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> None:
        with self._changed:
            if self._ended:
                question.fail(self._number, CLOSED)
                return
            for _ in range(next_open(self._waiting)):  # one that is late for long must not collect them
                self._waiting.popleft()
            self._waiting.append(question)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self) -> None:
        self._thread.join(_LONGEST_END_S)

    def _run(self) -> None:
        os.sched_setaffinity(0, self._device.cores)  # of this thread alone, as is the next
        torch.set_num_threads(1)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    for question in self._waiting:
                        question.fail(self._number, CLOSED)
                    return
                question = self._waiting.popleft()
            if not question.closed:
                self._answer(question)

    def _answer(self, question: Question) -> None:
        try:
            question.answer(self._number, self._computed(question))
        except CallGivenUp:
            question.fail(self._number, CLOSED)  # unless nobody waits for it any more
        except BaseException as error:
            question.fail(self._number, in_a_sentence(error))

    def _computed(self, question: Question) -> Any:
        member, device = self._member, self._device.torch_device
        stopping = StopBetweenOperators(lambda: question.closed or self._ended)
        args, kwargs = question.args, question.kwargs
        if not isinstance(member, nn.Module):
            return member(*args, **kwargs)
        if device is not None:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        with torch.no_grad(), evaluating(member), around(member, stopping):
            answer = member(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), answer) if device is not None else answer
