"""Hosts that hide forward behind their link: `--overlap`.

A step is decided as ever, and returns. What is still on its way then comes back while the next forward runs: a thread
of every owner updates each bucket as it comes, and forward waits for a parameter only where it computes with it. So
buckets are sent in another order. As long as backward runs they go as they land, the back of the model first; what is
left then goes from the front, which the next forward needs first:

    link       ▒▒ 0 ▒▒ 1 ▒▒│▒▒ 9 ▒▒ 8 ▒▒ 7 ▒▒ 6 ▒▒ 5 ▒▒ 4 ▒▒ 3 ▒▒ 2 ▒▒│▒▒ 0 ▒▒ 1
    replica    backward ▓▓▓▓│┃ decided      forward  ░░ ░░ ░░ ░░ ░░ ░░ ░│░ backward ▓▓▓▓
    updates            0  1 │    9    8    7    6    5    4    3      2 │

All hosts send in the same order, since each of the few exchanges that are under way waits for its like elsewhere; how
many go as they land is measured, and agreed on now and then.

The next backward begins when the step is complete, because its gradients go where this step's were. So does everything
else that needs the whole model; and a script that touches a parameter between two steps waits for all of them.

Once a step has returned, no host that was lost can be gone on without: what others have applied of it cannot be taken
back. And nothing is known of the gradient as a whole before its parts are applied, of its length neither.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

import torch

from paceline.exchange.members import MemberLost, Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import Phase, Word
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.between_hosts import AT_ONCE, BetweenHosts
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.link_threads import LinkThreads
from paceline.mirrored.owner import Owner
from paceline.mirrored.parameter_waits import ParameterWaits
from paceline.mirrored.step_parts import DecidedStep

_AGREED_AFTER = (2, 5, 20)  # steps, and then every so many:
_AGREED_EVERY = 100
_LOOK_EVERY_S = 0.0003
_LOOK_AT_END_S = 0.1


class OverlappedHosts(BetweenHosts):
    """Updates this owner's shard while the script goes on."""

    overlaps = True

    def __init__(self, together: Together, links: LinkMaker, wire_name: str) -> None:
        super().__init__(together, links, wire_name)
        self._updates = LinkThreads(1)
        self._updating: Future[None] | None = None  # of the last step, in that thread
        self._step: DecidedStep | None = None  # the same, until it is complete
        self._in_step = False  # else the script is between two
        self._steps = 0
        self._as_they_land = 1 << 30  # buckets that are sent in that order
        self._back: list[int] = []  # when backward was over, in each step since all have agreed on that
        self._begun = False  # to send what the try that is being made gives

    def open(self, arena: ModelArena, owner: Owner, sums: SharedSums, buffers: Sequence[torch.Tensor]) -> None:
        super().open(arena, owner, sums, buffers)
        self._waits = ParameterWaits(arena, self._await_use)

    def begin(self, members: Members, number: int) -> None:
        self._in_step, self._begun, self._try = True, False, members
        self.enter(members)
        self._expect_gradients(members)

    def begin_backward(self) -> None:
        if not self._begun:
            self._begun = True
            self._let_end()
            self._begin_sending(self._try)

    def _order(self, buckets: int) -> Sequence[int]:
        first = min(self._as_they_land, buckets)
        return [*range(first), *range(buckets - 1, first - 1, -1)]

    def computed(self, members: Members, number: int) -> None:
        super().computed(members, number)
        self._back.append(sum(future.done() for future in list(self._sent)))

    def agree(self, step: DecidedStep) -> None:
        if self._sending is not None:
            self._await(self._sending)  # all have landed
        self._steps += 1
        if self._steps in _AGREED_AFTER or not self._steps % _AGREED_EVERY:
            self._agree_on_order()

    def _agree_on_order(self) -> None:
        """Buckets that were back when backward was over had left as they landed, and in part so had those under way."""
        back = torch.tensor(sum(self._back) / len(self._back), dtype=torch.float64)
        self._back.clear()
        if self._links is not None:
            with self._crossing():
                back = self._links.sum(back) / self.count
        self._as_they_land = math.ceil(back.item()) + AT_ONCE // 2

    def decide(self, members: Members) -> None:
        """No death between hosts is survived, so there is nothing to be decided between them."""

    # ── from the end of a step until it is complete ──────────────────────────────────────────────────────

    def update_shards(self, owner: Owner, step: DecidedStep, scale: float) -> None:
        self._step, self._in_step = step, False
        own = sorted(self._place_of, key=self._place_of.__getitem__)
        self._updating = self._updates.submit(owner.update_in_turn, step.members, own)
        self._waits.begin()

    def arrived(self, chunk: int) -> None:
        """In the thread that updates, in which nothing is said of this replica on the board."""
        self._sent[self._place_of[chunk]].result()
        self._memory.keep_untouched(chunk, self._touched)

    def complete(self) -> None:
        if self._step is not None:
            members, board = self._step.members, self._together.board
            # Also of those without a chunk: none of them reads any more what was written down for this step.
            self._await_updates(lambda: all(board.get(rank, Word.DONE) >= members.op for rank in members.ranks))
            assert self._updating is not None
            self._updating.result()
            self._step = None
        self._waits.end()

    def _await_use(self, chunks: Sequence[int]) -> None:
        """Somebody is about to use parameters that these are of."""
        if self._in_step or threading.get_ident() != self._waits.thread or self.on_touch is None:
            self._await_chunks(chunks)
        else:
            self.on_touch()

    def _await_chunks(self, chunks: Sequence[int]) -> None:
        """Returns when these are updated, by whichever owner of this host."""
        if self._step is not None:
            updated, op = self._arena.updated, self._step.members.op
            self._await_updates(lambda: all(updated[chunk] >= op for chunk in chunks))

    def _await_updates(self, are_made: Callable[[], bool]) -> None:
        step, updating = self._step, self._updating
        if step is None or updating is None:
            return
        members = step.members

        def ready() -> bool:
            if updating.done():
                updating.result()  # it may have failed
            if are_made():
                return True
            self._together.board.check_view(members)
            return False

        with self._not_tried_again("updating with the sums of all hosts"):
            self._together.board.wait(
                members.replica,
                Phase.AWAITING_HOSTS,
                ready,
                self._together.timeout_s,
                rest=lambda: time.sleep(_LOOK_EVERY_S),
            )

    def close(self) -> None:
        """Other hosts may be about to look at their model, which lacks what this owner has not sent yet."""
        if not self._closed and self._updating is not None and self._step is not None:
            until = time.monotonic() + self._together.timeout_s
            with suppress(MemberLost):
                while not wait([self._updating], _LOOK_AT_END_S).done and time.monotonic() < until:
                    self._together.board.check_view(self._step.members)
        self._waits.end()
        super().close()
        self._updates.close()
