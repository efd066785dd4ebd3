"""A pool of processes whose members die at the wrong moment: while they start, ready but not asked yet, of a version
that is not the newest. The processes are real, forked from here; what they wait for is a file."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.combining import Combination
from paceline.errors import CheckpointError
from paceline.memory import segment
from paceline.serve.answering import ProcessEnds, be_model_process
from paceline.serve.batching import Asked, RequestQueue
from paceline.serve.ensemble_pool import EnsemblePool
from paceline.serve.model_pool import ModelPool
from paceline.serve.request_error import RequestError
from paceline.serve.row_batches import shape_of
from paceline.serve.serving_metrics import ServingMetrics
from paceline.serve.shared_values import SharedValues
from paceline.serve.version_source import FileSource, TakenVersion

LONG_S = 90.0
ROW = {"x": np.ones((1, 2), np.float32)}


class NumberSource:
    """Its n-th version is the number n; a broken one is none."""

    words, problem = "a number", ""

    def __init__(self) -> None:
        self.taken, self.broken = 0, False

    def take(self) -> TakenVersion:
        if self.broken:
            raise CheckpointError("this number is broken")
        self.taken += 1
        copy = segment.make("number", 8)
        os.pwrite(copy, struct.pack("d", self.taken), 0)
        return TakenVersion(copy)

    def has_changed(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Forking:
    """A template whose processes are forked from the test. They answer `number * x`; the start of the n-th, and every
    answer to a row that begins with 5, wait while there is a file of that name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counting = folder, itertools.count(1)

    def start(self, request: Any, descriptors: Sequence[int]) -> tuple[int, int]:
        start = next(self.counting)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            channel, requests, answers, lifeline, number = map(os.dup, descriptors)
            ends = ProcessEnds(socket.socket(fileno=channel), SharedValues(requests), SharedValues(answers), lifeline)

            def factory() -> Callable[..., Any]:
                while_there(self.folder / str(start))
                (weight,) = struct.unpack("d", os.pread(number, 8, 0))

                def answer(given: dict[str, Any]) -> dict[str, Any]:
                    if given["x"][0, 0] == 5:
                        while_there(self.folder / "hold")
                    return {"y": weight * given["x"]}

                return answer

            be_model_process(ends, factory, (), kept=[number])
        return process, os.pidfd_open(process)


def while_there(path: Path) -> None:
    while path.exists():
        time.sleep(0.002)


async def until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not fact():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def with_pool(
    folder: Path, processes: int, test: Callable[[ModelPool, Any, list[str]], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        notes: list[str] = []
        source = NumberSource()
        pool = made_pool(folder, source, processes, ServingMetrics(), notes)
        try:
            await asyncio.wait_for(test(pool, source, notes), LONG_S)
        finally:
            await pool.close()

    asyncio.run(run())


def made_pool(
    folder: Path, source: Any, processes: int, metrics: ServingMetrics, notes: list[str], member: str = ""
) -> ModelPool:
    template: Any = Forking(folder)
    cores = [()] * processes
    queue = RequestQueue(8, 8)
    return ModelPool(template, source, queue, metrics, cores=cores, deadline_s=1.0, note=notes.append, member=member)


async def answers(pool: Any, version: int | None = None) -> tuple[int, float]:
    answer = await pool.ask(ROW, 1, LONG_S, version)
    return answer.version, float(answer.outputs["y"][0, 0])


def test_a_process_that_dies_between_ready_and_the_first_request_is_replaced(tmp_path: Path) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        (tmp_path / "2").touch()  # the other one lets the first wait
        loading = asyncio.ensure_future(pool.load())
        members = pool._processes.by_name
        await until(lambda: any(member.started.done() for member in members.values()))
        (ready,) = (member for member in members.values() if member.started.done())
        os.kill(ready.process.process, signal.SIGKILL)
        await until(lambda: not ready.process.alive)
        (tmp_path / "2").unlink()
        assert await loading == 1
        assert [await answers(pool) for _ in range(3)] == [(1, 1.0)] * 3
        await until(lambda: len(pool.queue.running) == 2)
        assert all(members[name].process.alive for name in pool.queue.running)
        await pool.look()

    with_pool(tmp_path, 2, test)


def test_a_version_is_loaded_though_a_process_is_killed_while_it_starts(tmp_path: Path) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        (tmp_path / "1").touch()
        loading = asyncio.ensure_future(pool.load())
        await until(lambda: bool(pool.processes))
        (process,) = pool.processes.values()
        os.kill(process, signal.SIGKILL)
        assert await loading == 1
        assert await answers(pool) == (1, 1.0)
        (tmp_path / "1").unlink()

    with_pool(tmp_path, 1, test)


def test_who_asks_for_a_version_whose_last_process_dies_is_told_at_once(tmp_path: Path) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        await pool.load()
        (tmp_path / "hold").touch()
        holding = pool.ask({"x": np.full((1, 2), 5, np.float32)}, 1, LONG_S, None)
        await until(lambda: any(pool.queue.running.values()))
        waiting = asyncio.ensure_future(answers(pool, version=1))
        await until(lambda: bool(pool.queue.waiting))
        (process,) = pool.processes.values()
        assert await pool.load() == 2
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RequestError, match="the last process of version 1 died: ask for another version") as told:
            await waiting
        assert told.value.status == 503
        (tmp_path / "hold").unlink()
        answer = await holding  # it named no version, so the newest answers it
        assert (answer.version, answer.outputs["y"].tolist()) == (2, [[10.0, 10.0]])

    with_pool(tmp_path, 1, test)


def test_who_gives_less_time_than_the_model_takes_is_told_so_and_who_gives_enough_that_it_is_late(
    tmp_path: Path,
) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        await pool.load()
        for _ in range(3):
            await answers(pool)
        for share, more_s, status in ((0.1, 0.0, 429), (1.0, 0.3, 504)):
            usual_s = pool.queue.alone_s(Asked(0, shape_of(ROW), 1, 0.0))
            assert usual_s > 0
            deadline_s = share * usual_s + more_s
            (tmp_path / "hold").touch()
            with pytest.raises(RequestError) as told:
                await pool.ask({"x": np.full((1, 2), 5, np.float32)}, 1, deadline_s, None)
            assert told.value.status == status
            (tmp_path / "hold").unlink()
            await until(lambda: not any(pool.queue.running.values()))

    with_pool(tmp_path, 1, test)


def test_a_pool_is_closed_though_a_process_is_just_being_replaced(tmp_path: Path) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        await pool.load()
        (tmp_path / "2").touch()  # the second process is started, and is not ready
        (first,) = pool._processes.by_name.values()
        os.kill(first.process.process, signal.SIGKILL)
        await until(lambda: any(member is not first for member in pool._processes.by_name.values()))
        await asyncio.wait_for(pool.close(), LONG_S / 3)
        assert not pool._processes.by_name

    with_pool(tmp_path, 1, test)


def test_a_process_is_not_stuck_while_the_deadline_of_its_request_is_far_away(tmp_path: Path) -> None:
    async def test(pool: ModelPool, _: Any, notes: list[str]) -> None:
        await pool.load()
        (member,) = pool._processes.by_name.values()
        for deadline_s, is_killed in ((LONG_S, False), (1.0, True)):  # the pool's own is 1 s
            (tmp_path / "hold").touch()
            asking = pool.ask({"x": np.full((1, 2), 5, np.float32)}, 1, deadline_s, None)
            await until(lambda: bool(member.batch))
            member.since -= 100.0  # more than a minute and ten of the pool's deadlines
            await pool.look()
            assert any("it had been at one batch for 100 s" in note for note in notes) == is_killed
            (tmp_path / "hold").unlink()
            if not is_killed:
                assert (await asking).outputs["y"].tolist() == [[5.0, 5.0]]

    with_pool(tmp_path, 1, test)


def test_an_ensemble_loads_all_members_or_none(tmp_path: Path) -> None:
    async def run() -> None:
        sources = {"a": NumberSource(), "b": NumberSource()}
        metrics = ServingMetrics()
        pools = {name: made_pool(tmp_path, source, 1, metrics, [], name) for name, source in sources.items()}
        ensemble = EnsemblePool(pools, Combination("mean", "values", -1, None), 2, metrics)
        try:
            assert await ensemble.load() == 1
            assert await answers(ensemble) == (1, 1.0)
            sources["b"].broken = True
            with pytest.raises(CheckpointError, match="broken"):
                await ensemble.load()
            assert await answers(ensemble) == (1, 1.0)
            sources["b"].broken = False
            assert await ensemble.load() == 2
            number, value = await answers(ensemble)
            assert (number, value) == (2, 2.5)  # the version of a that was made in vain has a number too
        finally:
            await ensemble.close()

    asyncio.run(run())


def test_a_file_that_is_being_written_is_taken_when_it_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"old")
    real = os.sendfile
    writes = [b"half of", b"all of what is new"]

    def while_it_is_written(*arguments: Any) -> int:
        sent = real(*arguments)
        if writes and sent:
            path.write_bytes(writes.pop(0))
        return sent

    monkeypatch.setattr(os, "sendfile", while_it_is_written)
    source = FileSource(str(path))
    copy = source.take().copy
    assert os.pread(copy, 100, 0) == b"all of what is new"
    os.close(copy)
    assert not source.has_changed()
