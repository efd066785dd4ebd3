"""The board that a host's replicas begin with, or begin anew with."""

from __future__ import annotations

import os

from paceline.exchange.board import Board
from paceline.exchange.words import HostWord, Word
from paceline.launch.cores import allowed_cores
from paceline.launch.job import RunJob


def new_board(job: RunJob) -> Board:
    """One on which nobody has written."""
    board = Board.create(job.place.rows, supervised=True)
    board.host_set(HostWord.CORES, len(allowed_cores()))
    board.host_set(HostWord.DEVICES, job.place.strategy.devices)
    return board


def board_after(before: Board, job: RunJob, *, servers: bool) -> Board:
    """A new one for all to start anew, in the place of the one before."""
    board = new_board(job)
    if servers:
        # Servers have not forgotten those who died, and must not take the new ones for them.
        for row in range(job.place.rows):
            incarnation = before.get(row, Word.INCARNATION) + 1
            board.set(row, Word.INCARNATION, incarnation)
            board.set(row, Word.ADMITTED, incarnation)
    os.close(before.descriptor)
    return board
