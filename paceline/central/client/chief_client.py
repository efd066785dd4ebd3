"""What a replica and the chief of its container say to each other: work is taken, handed in and given back, tasks are
shared, rules set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import TaskKey
from paceline.central.client.initial_values import receive
from paceline.central.client.tasks import do_task
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.shards import Option
from paceline.data.script_call import ScriptCall
from paceline.deadlines import CallLimit
from paceline.loop.engine import Chapter
from paceline.loss_value import LossPart
from paceline.net.frames import Channel

STILL_GOOD_S = 0.05  # so long a ticket that has come with an answer is not asked for again


@dataclass(frozen=True)
class WhoAsks:
    """Which replica it is, and the how manyth process in its place."""

    container: str
    replica: int
    incarnation: int


class ChiefClient:
    """Speaks to the chief for one replica."""

    def __init__(
        self,
        to_chief: Connection,
        who: WhoAsks,
        model: nn.Module,
        buffers: list[tuple[str, torch.Tensor]],
        ended: Callable[[], Sequence[tuple[int, int]]] | None,
    ) -> None:
        """`buffers`: of the model, which every report brings and every ticket may. `ended` returns replicas, and the
        incarnations of their processes, that are known to have ended."""
        self.container, self.replica, self.incarnation = who.container, who.replica, who.incarnation
        self.model = model
        self.chief = who.replica == 0
        self.step = 0  # closed so far by its run, as far as this replica knows
        self.version = 0  # of the parameters, likewise: steps of other runs count too
        self._to_chief, self._mine = to_chief, asdict(who)
        self._buffers = buffers
        self._ended = ended
        self._asked: requests.Ask | None = None
        self._next: replies.Ticket | None = None  # what has come with the answer to the last report
        self._settled_at = 0.0  # when that was
        to_chief.while_waiting = self._tell_who_has_ended

    def ask(
        self, chapter: Chapter, call: ScriptCall | None, *, at_once: bool = False
    ) -> replies.Ticket | replies.Ended | replies.Waiting:
        """Work in a chapter; waits for it, unless it has to be `at_once`. What comes after it is asked for with the
        report on it. `call`: in which it is asked."""
        ledger = chapter.ledger
        assert ledger.length is not None
        request = requests.Ask(
            **self._mine,
            chapter=chapter.number,
            length=ledger.length,
            batch_size=ledger.batch_size,
            left_out=ledger.length % ledger.batch_size if ledger.drop_last else 0,
            stop_epoch=chapter.stop_epoch,
            call=call,
            at_once=at_once,
        )
        coming, self._next = self._next, None
        # After a pause it may be late already, or of a chief that has died since: then the chief is asked whether not.
        if coming is not None and request == self._asked and time.monotonic() - self._settled_at < STILL_GOOD_S:
            return coming
        self._asked = None if at_once else request
        ask = self._to_chief.call if at_once else self._to_chief.wait
        kinds = (replies.Ticket, replies.Ended, replies.Waiting)
        answer: replies.Ticket | replies.Ended | replies.Waiting = ask(request, kinds, read=self._take_buffers)
        if not isinstance(answer, replies.Waiting):
            self.step = max(self.step, answer.step)
            self.version = max(self.version, answer.version)
        return answer

    def _take_buffers(self, channel: Channel[replies.Reply], length: int) -> None:
        if length:
            receive(channel, self._buffers)

    def hand_in(
        self, ticket: int, loss: LossPart, pulled: int, options: list[dict[str, Option]]
    ) -> replies.Settled | replies.Ticket:
        """Reports a ticket whose gradient the servers have, which was computed on the parameters of step `pulled`."""
        request = requests.Report(
            **self._mine, ticket=ticket, pulled=pulled, loss=loss, options=options, ask=self._asked
        )
        buffers = [bytes_of(buffer) for _, buffer in self._buffers]
        answer: replies.Settled | replies.Ticket = self._to_chief.wait(
            request, (replies.Settled, replies.Ticket), body=lambda: buffers, read=self._take_buffers
        )
        if isinstance(answer, replies.Settled):
            self.step, self.version = answer.step, answer.version
            self.chief, self._next = answer.chief, answer.next
            self._settled_at = time.monotonic()
        return answer

    def _tell_who_has_ended(self) -> None:
        """A replica that ended before it had come to the servers is expected there, and nobody else would say so."""
        for replica, incarnation in self._ended() if self._ended is not None else ():
            leave = requests.Leave(container=self.container, replica=replica, incarnation=incarnation)
            self._to_chief.call(leave, replies.Done)

    def give_back(self, held: replies.Ticket | None = None, timeout_s: float | None = None) -> None:
        """Give back the ticket that came with the last report, before something else is done, or the one that is
        `held`: others may need it."""
        ticket, self._next = held or self._next, None
        if ticket is not None:
            request = requests.GiveBack(**self._mine, ticket=ticket.ticket)
            self._to_chief.call(request, replies.Done, timeout_s=timeout_s)

    def task(
        self,
        key: TaskKey,
        length: int,
        work: Callable[[range], list[float]],
        call: ScriptCall | None = None,
        limit: CallLimit | None = None,
    ) -> list[float]:
        """Do parts of a task until it is done, by whomever, or until this replica is late; return its result."""
        self.give_back()
        ask = requests.Task(**self._mine, key=key, length=length, call=call, at_once=limit is not None)
        done = do_task(self._to_chief, ask, work, self.model, self._mine, limit)
        self.chief = done.chief
        return list(done.values)

    def once(self, key: TaskKey, act: Callable[[], None]) -> None:
        """Have one replica act, whichever comes first; the others wait for it."""

        def work(_: range) -> list[float]:
            act()
            return []

        self.task(key, 1, work)

    def set_rule(self, rule: Any) -> None:
        self.give_back()  # it was for a step under the rule before
        self._to_chief.call(requests.SetRule(container=self.container, rule=rule), replies.Done)

    def accepting(self) -> int:
        """Return how many gradients make a step now."""
        return int(self._to_chief.call(requests.Describe(container=self.container), replies.Described).accepting)

    def request_stop(self) -> None:
        self._to_chief.call(requests.Stop(container=self.container), replies.Done)

    def books(self) -> Books:
        """Return the chief's books as they are now."""
        read: replies.BooksRead = self._to_chief.call(requests.ReadBooks(container=self.container), replies.BooksRead)
        return read.books

    def steps_made(self) -> int:
        """Return how many steps the servers have made so far."""
        listed: replies.Listed = self._to_chief.call(requests.Containers(), replies.Listed)
        return next(container.step for container in listed.containers if container.name == self.container)

    def leave(self) -> None:
        request = requests.Leave(**self._mine)
        self._to_chief.call(request, replies.Done, timeout_s=5.0)

    def forget_next(self) -> None:
        """Whoever is gone has nothing any more."""
        self._next = None
