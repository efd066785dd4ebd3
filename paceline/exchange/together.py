"""What replicas do together: ops tried until they are complete, and shards finished by whoever is left.

attempt   try an op with all members; when one dies before it is complete, try again without it
decide    with several hosts: go on when all of them have completed a try
meet      go on when everybody is here
once      the first member acts, everybody goes on when that is done
ask       devices of one replica answer together
attach    open the memory that another one holds
finish    everybody works on its own shard; the lowest-ranked survivor finishes those of the dead
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.deadlines import CallLimit, call_limit
from paceline.errors import ArenaError, DeadlineExceeded, Stalled
from paceline.exchange.board import Board
from paceline.exchange.host_views import HostViews, await_decision
from paceline.exchange.members import MemberLost, Members, OpGivenUp
from paceline.exchange.words import HostWord, Kind, Phase, Word
from paceline.memory.arena import Arena
from paceline.stoppable_calls import CallGivenUp, check_in_time

T = TypeVar("T")


class Together:
    """One replica's side of everything the replicas of a host do together."""

    def __init__(self, board: Board, replica: int, timeout_s: float, views: HostViews | None = None) -> None:
        """`views`: of the run's hosts, if supervisors keep several together."""
        self.board = board
        self.replica = replica
        self.timeout_s = timeout_s
        self.views = views
        self.limit: CallLimit | None = None  # of the op in hand

    def is_first(self) -> bool:
        """Whether this replica speaks for the others at this moment."""
        op = self.board.get(self.replica, Word.OP)
        # One that was started again takes part from the next op on, and all others may have died before that.
        members = self.board.members(self.replica, op).ranks or self.board.members(self.replica, op + 1).ranks
        return members[:1] == (self.replica,)

    def coming(self) -> Members:
        """Who will take part in the next op, if nobody dies before."""
        op = self.board.get(self.replica, Word.OP) + 1
        return self.board.members(self.replica, op) if self.views is None else self.views.coming(op)

    def others_at_it(self) -> list[int]:
        """Returns the living whom one that was started again can still join: ends the process if they have gone on to
        another trainer of the script, and may have let go of the memory of this one."""
        board, me = self.board, self.replica
        living = [rank for rank in range(board.replicas) if board.alive(rank)]
        if any(board.get(rank, Word.ARENAS) > board.get(me, Word.ARENAS) for rank in living):
            print(f"replica {me} cannot join any more: the script has gone on to another trainer", file=sys.stderr)
            raise SystemExit(0)
        return living

    def attempt(self, one_try: Callable[[Members], T], *, limited: bool = False, on_host: bool = False) -> T:
        """Do the next op with all members; again with those who are left, when one dies before it is complete.

        `on_host`: with those of this host alone, whatever happens on others. Nothing is decided at its end, so nobody
        may leave it for a new view: others, who have seen all arrive, would have gone on.

        `limited` by a deadline, if there is one around the call: a member that has not arrived when its time is over
        gives the op up. That can never be complete then, so all do: `DeadlineExceeded` in all of them, or in none. Who
        has arrived cannot withdraw.
        """
        op, board, me = self.board.next_op(self.replica), self.board, self.replica
        views = None if on_host else self.views
        self.limit = call_limit() if limited else None
        try:
            while True:
                members = board.members(me, op) if views is None else views.members(op)
                try:
                    return one_try(members)
                except MemberLost:
                    board.set(me, Word.RETRIES, board.get(me, Word.RETRIES) + 1)
                    if views is not None:
                        views.leave(members)
        except CallGivenUp:
            assert self.limit is not None
            late = self.limit.exceeded(board.called(me))
            board.give_up(me, op, late.limit_s, late.late_s)
            raise late from None
        except OpGivenUp as given_up:
            by = given_up.by
            limit_s, late_s = board.get_float(by, Word.LIMIT), board.get_float(by, Word.LATE)
            raise DeadlineExceeded(board.called(by), limit_s, late_s) from None
        finally:
            self.limit = None

    def arrive(self, members: Members, phase: Phase) -> None:
        """This replica's part of the try is complete; wait for the others'."""
        check_in_time(self.limit)
        self.board.arrive(members)
        self.board.await_arrivals(members, phase, self.timeout_s)

    def decide(self, members: Members, ask_hosts: Callable[[], None]) -> None:
        """This replica has all that its part of the try needs from other hosts; returns when that is so on every host:
        the op will be completed by all of them. `ask_hosts` returns when the first members of all hosts ask that."""
        board, views = self.board, self.views
        assert views is not None
        try:
            board.set(self.replica, Word.COMPLETED, members.tag)
            board.await_completions(members, self.timeout_s)
            if members.first == self.replica:
                ask_hosts()
                board.host_set(HostWord.DECIDED, members.op)
            else:
                await_decision(board, members, self.timeout_s)
        except MemberLost:
            views.leave(members)
            if board.host_get(HostWord.DECIDED) < members.op:
                raise

    def meet(self, kind: Kind, phase: Phase) -> Members:
        """Return when all members of this host are here."""

        def one_try(members: Members) -> Members:
            self.board.work_on(members, kind, Phase.BETWEEN)
            self.arrive(members, phase)
            return members

        return self.attempt(one_try, on_host=True)

    def once(self, act: Callable[[], None]) -> None:
        """The first member of each host acts; everybody returns when that is done on its own."""

        def one_try(members: Members) -> None:
            self.board.work_on(members, Kind.SAVE, Phase.SAVING)
            if members.first == self.replica:
                act()
            self.arrive(members, Phase.AWAITING_SAVE)

        self.attempt(one_try, on_host=True)
        self.board.enter(self.replica, Phase.BETWEEN)

    def ask(self, ranks: Sequence[int]) -> None:
        """Returns when these processes, this one among them, all ask their predictors: they answer together. Raises if
        one has ended, or has gone on to another call instead. One that is slow is waited for."""
        board, me = self.board, self.replica
        question = board.next_question(me)

        def ready() -> bool:
            for other in ranks:
                # Who begins an op has asked before what it was to ask before; who is dead has asked, or never will.
                alive, (op, kind) = board.alive(other), board.doing(other)
                if board.get(other, Word.ASKED) >= question:
                    continue
                if alive and op <= board.get(me, Word.OP):
                    return False
                does = f"while {board.called(other)} {kind.words}" if alive else f"and {board.called(other)} has ended"
                raise Stalled(
                    f"{board.called(me)} asks a predictor {does}: all devices of a replica must ask it together; "
                    "trainer.predict answers one alone"
                )
            return True

        board.wait(me, Phase.AWAITING_DEVICES, ready, self.timeout_s)

    def await_arena(self, number: int, maker: int) -> tuple[int, int, int]:
        """Returns who holds that arena, as `attach` takes it: a living replica, or `maker`, which is about to make it;
        `MemberLost` if that one has died."""

        def ready() -> bool:
            alive = self.board.alive(maker)
            if self.board.arena_holder(number) is not None:
                return True
            if not alive:
                raise MemberLost
            return False

        self.board.wait(self.replica, Phase.AWAITING_ARENA, ready, self.timeout_s)
        held = self.board.arena_holder(number)
        if held is None:
            raise MemberLost
        return held

    def attach(self, holder: int, process: int, descriptor: int) -> Arena:
        """The arena that replica `holder`, which is this process, holds open as `descriptor`; `MemberLost` if it has
        died meanwhile."""
        try:
            return Arena.attach(process, descriptor)
        except ArenaError:
            # It may have died a moment ago: then the supervisor is about to say so.
            give_up = time.monotonic() + 1.0
            while self.board.alive(holder):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.001)
            raise MemberLost from None

    def finish(
        self,
        members: Members,
        word: Word,
        phase: Phase,
        work: Callable[[int], None],
        put_right: Callable[[], None],
    ) -> None:
        """`work(rank)` does the work of that rank's shard; return when all members' is done.

        The lowest-ranked survivor works for the dead, after `put_right` has settled what they left half done. Only
        the supervisor declares deaths, and the dead write no more, so there is never more than one such survivor.
        """
        board, op = self.board, members.op
        work(self.replica)
        board.set(self.replica, word, op)

        def ready() -> bool:
            for other in members.ranks:
                alive = board.alive(other)  # looked at first: who is dead now has set its word before, or never will
                if board.get(other, word) >= op:
                    continue
                if alive or next(rank for rank in members.ranks if board.alive(rank)) != self.replica:
                    return False
                put_right()
                work(other)
                board.set(other, word, op)
            return True

        board.wait(self.replica, phase, ready, self.timeout_s)

    def unfinished(self, members: Members) -> list[tuple[int, int]]:
        """Of the dead among `members`: rank, and the chunk it was working on."""
        noted = [(rank, self.board.get(rank, Word.UNDO) - 1) for rank in members.ranks if not self.board.alive(rank)]
        return [(rank, chunk) for rank, chunk in noted if chunk >= 0]

    def settle(self, rank: int) -> None:
        """What `rank` had left half done is put right."""
        self.board.set(rank, Word.UNDO, 0)
