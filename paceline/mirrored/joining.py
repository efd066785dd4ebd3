"""A replica that was started again, or all of a host, takes part in the run in progress.

It opens the arena of the living, says on the board that it is ready, and waits. The first member of the next step
writes the run's state into the arena and admits it from the next op on, before arriving. All read that after the step
has closed, so all agree on the first op in which the newcomer takes part. How it is with a host: `newcomers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Phase, Word
from paceline.loop.run_state import RunState
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.step_parts import StepPart
from paceline.run_place import INTERRUPTED


@dataclass(frozen=True)
class Joining(StepPart):
    """Both sides of it."""

    together: Together
    arena: ModelArena
    publish_buffers: Callable[[], None]
    state: Callable[[], RunState]  # of the run, in the middle of a step

    def computed(self, members: Members, number: int) -> None:
        board, me = self.together.board, self.together.replica
        if members.first == me and board.any_joining(me, members.op):
            self._write_state()
            board.admit_joining(me, members.op)

    def _write_state(self) -> None:
        self.publish_buffers()
        self.arena.write_notes(msgspec.json.encode(self.state()))

    def join(self) -> RunState:
        """Waits to be admitted. Returns the run's state at the step after which this replica takes part."""
        board, me = self.together.board, self.together.replica
        incarnation = board.get(me, Word.INCARNATION)
        board.set(me, Word.JOINING, incarnation)

        def admitted() -> bool:
            if not self.together.others_at_it():
                raise SystemExit(0)  # the others have finished meanwhile
            return board.get(me, Word.ADMITTED) == incarnation and (
                board.host_get(HostWord.CLOSED) >= board.get(me, Word.ADMIT_AT) - 1
            )

        board.wait(me, Phase.AWAITING_ADMISSION, admitted, self.together.timeout_s)
        board.set(me, Word.OP, board.get(me, Word.ADMIT_AT) - 1)
        state = self._read_state()
        board.set(me, Word.SAMPLES_SEEN, max(board.get(rank, Word.SAMPLES_SEEN) for rank in range(board.replicas)))
        return state

    def _read_state(self) -> RunState:
        state = msgspec.json.decode(self.arena.read_notes(), type=RunState)
        self.together.board.set(self.together.replica, Word.JOINING, 0)
        return state

    # ── a host ───────────────────────────────────────────────────────────────────────────────────────────

    def written_state(self) -> list[torch.Tensor]:
        """Returns where the run's state lies; on a host that has it, it is written there."""
        if not self.together.board.get(self.together.replica, Word.JOINING):
            self._write_state()
        return self.arena.whole_state()

    def join_with_host(self, bring_state: Callable[[Members], None]) -> RunState:
        """Waits for the other hosts to let this one in, and has them `bring_state`. Returns the run's state at the step
        after which it takes part."""
        board, me = self.together.board, self.together.replica
        board.set(me, Word.JOINING, board.get(me, Word.INCARNATION))

        def let_in() -> bool:
            if board.host_get(HostWord.STOP_REQUESTED):
                raise SystemExit(INTERRUPTED)
            return board.host_get(HostWord.JOIN_AT) > 0 and board.host_get(HostWord.VIEW) > 0

        board.wait(me, Phase.AWAITING_ADMISSION, let_in, math.inf)  # a step of the others may take long
        board.set(me, Word.OP, board.host_get(HostWord.JOIN_AT) - 1)
        self.together.attempt(bring_state)
        return self._read_state()
