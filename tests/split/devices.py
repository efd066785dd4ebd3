"""Devices of one replica as threads of one process, with real mailboxes between them, for tests.

They have the random generator in common: what draws random numbers is tested with processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES, Peers
from paceline.memory.arena import Arena

T = TypeVar("T")
TIMEOUT_S = 20.0


def on_devices(count: int, work: Callable[[Peers], T]) -> list[T]:
    """What `work` returns on each of `count` devices; the first of their errors is raised."""
    board = Board.create(count, supervised=False)
    descriptor = os.memfd_create("test-peers")
    os.ftruncate(descriptor, count * count * BOX_BYTES)
    arena = Arena.of(descriptor)
    try:
        with ThreadPoolExecutor(count) as pool:
            devices = [Peers(arena, board, rank, rank, count, TIMEOUT_S) for rank in range(count)]
            return list(pool.map(work, devices))
    finally:
        arena.close()
        os.close(board.descriptor)
