"""Which replica's output the user sees: that of the one whose `trainer.chief` is true."""

from __future__ import annotations

from collections.abc import Collection

from paceline.exchange.board import Board
from paceline.exchange.words import Word


def next_shown(board: Board, living: Collection[int], finished: Collection[int], shown: int) -> int | None:
    """The row to show from now on instead of `shown`: the first of those who take part; None: it stays.

    One that was started again is chief from the first op on that it begins as a member; what the one before it had to
    say as chief it has printed before it begins that op itself. Nobody repeats the last words of one that has finished.
    """
    members = [row for row in living if board.alive(row)]
    first = min((row for row in members if board.get(row, Word.OP) >= board.get(row, Word.ADMIT_AT)), default=None)
    if first is None or (first >= shown and shown in {*living, *finished}):
        return None
    if shown in living and board.alive(shown) and board.get(shown, Word.OP) < board.get(first, Word.ADMIT_AT):
        return None
    return first
