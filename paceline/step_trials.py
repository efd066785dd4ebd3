"""Steps of a script as they really are under a strategy, without training: for a profile.

What this machine can run need not be worked out. The process that has run the script up to its first step is forked,
a replica, a device or a server each, and the forks make some steps by the product's own engines, on the script's own
data. What they train are copies, which end with them:

    script ─▶ first step ─┬─ fork: replica 0 ─▶ its steps' times
                          ├─ fork: replica 1
                          └─ fork: server

A fork has one thread, whatever its parent had. So strategies are tried whose replicas and devices have one core each;
and one replica that has all of them, by this process itself, last of all.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.data.feed import Feed
from paceline.data.ledger import Ledger
from paceline.exchange.board import Board
from paceline.exchange.words import Word
from paceline.forked import Forks
from paceline.launch.cores import share_of_cores
from paceline.loop.training_loop import Training, TrainingLoop
from paceline.memory.heap import keep_memory
from paceline.net.secure import read_token, write_token
from paceline.opening import open_engine
from paceline.profile.step_times import timing
from paceline.profile.values import StepTrial
from paceline.run_place import Place, ServersPlace
from paceline.strategy import Strategy

WARM_UP = 3  # steps that are not counted; cut models hold the loss against its graph at steps 1, 2, 4, 8 …
LEAST, MOST = 9, 400  # steps that are made
_SWITCH_EVERY_S = 0.0005  # of a server, as in its own process
_MANY = 1 << 20  # epochs, or steps


class MadeSteps(msgspec.Struct, frozen=True):
    """What one process tells: how long its steps took, and of each how long it computed."""

    seconds: list[float]
    computed_s: list[float]


@dataclass(frozen=True)
class StepTrials:
    """Tries strategies on one script; `feed` and `ledger` are those of its own call of `batches`."""

    training: Training
    feed: Feed
    ledger: Ledger

    @property
    def possible(self) -> bool:
        """Whether samples can be had in forks: a stream gives each once, and workers answer one process."""
        return self.feed.length is not None and not self.feed.by_workers

    def measure(
        self, strategy: Strategy, cores: tuple[int, ...], guess_s: float, long_s: float, until: float
    ) -> StepTrial | None:
        """Returns what a step takes, of as many as `long_s` has if each takes `guess_s`; None if that cannot be told
        until then."""
        steps = WARM_UP + min(MOST, max(LEAST, round(long_s / max(1e-6, guess_s))))
        if not self.possible or not self._fits(strategy):
            return None
        try:
            made = self._made(strategy, cores, steps, until)
        except Exception:  # whatever keeps it from being tried, it can be planned from its parts
            return None
        if made is None or len(made.seconds) < LEAST // 2:
            return None
        turns = strategy.replicas if strategy.on_servers and strategy.rule.is_async else 1
        step = timing([seconds / turns for seconds in made.seconds])
        computed = timing(made.computed_s).seconds if made.computed_s else 0.0
        return StepTrial(strategy=strategy, timing=step, computed_s=min(computed / turns, step.seconds))

    def _made(self, strategy: Strategy, cores: tuple[int, ...], steps: int, until: float) -> MadeSteps | None:
        """Returns what the first process tells; None where each would have several threads."""
        if strategy.processes == 1 and not strategy.on_servers:
            return self._make(self._place(strategy, 0, Board.create(1, supervised=False)), steps)
        return self._made_by_forks(strategy, cores, steps, until) if strategy.processes >= len(cores) else None

    def _fits(self, strategy: Strategy) -> bool:
        """Returns whether there is a sample for each replica in every batch."""
        return strategy.replicas <= min(self.ledger.batch_size, self.feed.length or 0)

    def _place(self, strategy: Strategy, row: int, board: Board, servers: ServersPlace | None = None) -> Place:
        return msgspec.structs.replace(
            self.training.place,
            row=row,
            rows=strategy.processes,
            board=board.descriptor,
            strategy=strategy,
            servers=servers,
            started_by="paceline run",
            checkpoints=False,
            profiling=None,
        )

    def _make(self, place: Place, steps: int) -> MadeSteps:
        """Makes steps as the process at this place."""
        keep_memory()
        loop = TrainingLoop(replace(self.training, place=place), open_engine)
        ledger = Ledger(
            self.feed.length,
            self.ledger.batch_size,
            seed=self.ledger.seed,
            shuffle=self.ledger.shuffle,
            drop_last=self.ledger.drop_last,
        )
        marks, computed = [time.perf_counter()], [0.0]
        board = Board(place.board) if place.board is not None else None
        for batch in loop.batches(self.feed, ledger, _MANY, 2):
            loop.step(batch)
            marks.append(time.perf_counter())
            computed.append(board.get(place.row, Word.COMPUTE_NS) / 1e9 if board is not None else 0.0)
            if len(marks) > steps:
                break
        counted = [step for step in range(WARM_UP + 1, len(marks)) if step & (step - 1)]
        return MadeSteps([marks[step] - marks[step - 1] for step in counted], [computed[step] for step in counted])

    # ── several processes ────────────────────────────────────────────────────────────────────────────────

    def _made_by_forks(self, strategy: Strategy, cores: tuple[int, ...], steps: int, until: float) -> MadeSteps | None:
        """Returns what the first process of a run of forks tells."""
        with tempfile.TemporaryDirectory(prefix="paceline-trial-") as scratch, Forks() as forks:
            servers = self._start_servers(strategy, forks, Path(scratch))
            board = Board.create(strategy.processes, supervised=False)
            reading, writing = os.pipe2(os.O_CLOEXEC)
            try:
                for row in range(strategy.processes):
                    place = self._place(strategy, row, board, servers)
                    share = share_of_cores(row, strategy.processes, cores)
                    forks.start(lambda place=place, share=share: self._be(place, share, steps, writing))  # type: ignore[misc]
                os.close(writing)
                told = _read(reading, until, forks)
            finally:
                os.close(reading)
                os.close(board.descriptor)
        return msgspec.json.decode(told, type=MadeSteps) if told else None

    def _be(self, place: Place, share: tuple[int, ...], steps: int, writing: int) -> None:
        """The whole life of a replica, or of a device: the first makes so many steps, and all others go on until they
        are ended, so that it is never alone."""
        _be_silent()
        os.sched_setaffinity(0, share)
        made = self._make(place, steps if place.row == 0 else _MANY)
        os.write(writing, msgspec.json.encode(made))

    def _start_servers(self, strategy: Strategy, forks: Forks, folder: Path) -> ServersPlace | None:
        if not strategy.on_servers:
            return None
        write_token(folder)
        addresses = []
        for _ in range(strategy.servers):
            listener = socket.create_server(("127.0.0.1", 0))
            addresses.append("{}:{}".format(*listener.getsockname()))
            forks.start(lambda listener=listener: _serve(listener, read_token(folder)))  # type: ignore[misc]
            listener.close()
        return ServersPlace(addresses=addresses, container="trial", token_folder=str(folder))


def _serve(listener: socket.socket, token: str) -> None:
    """The whole life of a server."""
    from paceline.central.server.server import Server

    _be_silent()
    keep_memory()
    sys.setswitchinterval(_SWITCH_EVERY_S)
    Server(listener, token=token).run()


def _be_silent() -> None:
    """What goes wrong in a trial means that there is none: nobody is told how."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _read(reading: int, until: float, forks: Forks) -> bytes:
    """Returns what is written there up to its end; nothing if that is not before `until`."""
    told = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([reading], [], [], min(left, 0.05))[0]:
            part = os.read(reading, 1 << 16)
            if not part or (told := told + part).endswith(b"}"):
                return told
        elif forks.failed():
            return b""
    return b""
