"""Processes of one host that found each other through a store of torch.distributed, and wait for one another.

Nobody supervises them, so each looks for itself whether the one it waits for still runs: the kernel tells by a process
descriptor (pidfd), which never means another process that got the same number later. What a rank is doing stands on
the board, for the sentence that explains a wait that was too long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from paceline.errors import LaunchError, Stalled
from paceline.exchange.board import Board
from paceline.exchange.life import Life
from paceline.exchange.words import HostWord, Phase, Word
from paceline.memory import segment
from paceline.memory.arena import Arena
from paceline.torch_group.errors import RankDied, RankLate

LEAST_MEETING_S = 60.0  # processes that begin together may take so long until all have begun
LOOKS_BETWEEN_CHECKS = 32  # whether the others live is asked this rarely: it costs a system call for each


class RankGroup:
    """This rank, and what it knows of the others."""

    def __init__(self, store: Store, rank: int, count: int, timeout_s: float, sizes: Iterable[int]) -> None:
        """All ranks call this. Rank 0 makes the board, and segments of these sizes; the others open them."""
        self.rank = rank
        self.count = count
        self.timeout_s = timeout_s
        self.meanwhile: Callable[[], object] = lambda: None  # is called now and then in a wait
        own = (
            []
            if rank
            else [Board.create(count, supervised=False).descriptor, *(segment.make("group", size) for size in sizes)]
        )
        store.set(f"rank-{rank}", "/".join(map(str, (_host(), os.getpid(), *own))))
        self._await_all(store, "rank-")
        told = [store.get(f"rank-{other}").decode().split("/") for other in range(count)]
        for other, (host, *_) in enumerate(told):
            if host != told[rank][0]:
                raise LaunchError(
                    f"ranks {rank} and {other} of the process group run on different hosts (or in different "
                    "containers): the backend paceline is for the processes of one host"
                )
        if rank:
            holder, *held = map(int, told[0][1:])
            own = [segment.open_held(holder, descriptor) for descriptor in held]
        self._alive = [Life(int(pid)) for _, pid, *_ in told]
        self.board = Board(own[0])
        self.arenas = [Arena.of(descriptor) for descriptor in own[1:]]
        self.board.host_set(HostWord.CORES, len(os.sched_getaffinity(0)))
        # Rank 0 closes what it has opened when everybody has it too; and whoever serves the store goes on then.
        store.set(f"opened-{rank}", "")
        self._await_all(store, "opened-")
        for arena in self.arenas:
            arena.close()
        os.close(own[0])

    def _await_all(self, store: Store, key: str) -> None:
        """Until every rank has set its key."""
        limit_s = max(self.timeout_s, LEAST_MEETING_S)
        try:
            store.wait([f"{key}{other}" for other in range(self.count)], timedelta(seconds=limit_s))
        except RuntimeError as error:
            late = ", ".join(str(other) for other in range(self.count) if not store.check([f"{key}{other}"]))
            raise RankLate(
                f"rank {self.rank} has waited {limit_s:g} s for rank {late} to come to the process group: "
                "all its ranks must make it at the same time"
            ) from error

    def wait(
        self, ready: Callable[[], bool], awaited: Callable[[], Iterable[int]], doing: str, limit_s: float | None = None
    ) -> None:
        """Until `ready()`; `awaited()` are those it is waiting for, `doing` what for, `limit_s` how long at most."""
        timeout_s = self.timeout_s if limit_s is None else limit_s
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            if looks % LOOKS_BETWEEN_CHECKS:
                return ready()
            self.meanwhile()
            dead = [other for other in range(self.count) if other != self.rank and not self._alive[other]]
            if ready():  # it may have ended after it had done its part
                return True
            for other in awaited():
                if other in dead:
                    raise RankDied(f"rank {self.rank} waits for rank {other} in {doing}, whose process has ended")
            return False

        try:
            self.board.wait(self.rank, Phase.AWAITING_DEVICES, look, timeout_s)
        except Stalled:
            late = ", ".join(str(other) for other in awaited())
            raise RankLate(
                f"rank {self.rank} has waited its timeout of {timeout_s:g} s in {doing} for rank {late}: "
                "every rank of a group must make the same calls in the same order, and in time"
            ) from None

    def number_of(self, rank: int) -> int:
        """What `rank` has announced by `announce` last."""
        return self.board.get(rank, Word.POSTED)

    def announce(self, number: int) -> None:
        self.board.set(self.rank, Word.POSTED, number)


def _host() -> str:
    """The same for processes that can open each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
