"""A replica that was started again takes part in the run in progress.

It opens the arena of the living, says on the board that it is ready, and waits. The first member of the next step
writes the run's state into the arena and admits it from the next op on, before arriving. All read that after the step
has closed, so all agree on the first op in which the newcomer takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from paceline.exchange.board import Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Phase, Word
from paceline.loop.run_state import RunState
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.step_parts import StepPart


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
            self.publish_buffers()
            self.arena.write_notes(msgspec.json.encode(self.state()))
            board.admit_joining(me, members.op)

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
        state = msgspec.json.decode(self.arena.read_notes(), type=RunState)
        board.set(me, Word.SAMPLES_SEEN, max(board.get(rank, Word.SAMPLES_SEEN) for rank in range(board.replicas)))
        board.set(me, Word.JOINING, 0)
        return state
