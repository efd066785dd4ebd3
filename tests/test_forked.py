"""A process is forked next to threads that hold locks: it computes, or another is forked in its place."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from paceline import forked
from paceline.errors import ReplicaDied


def computed_in_a_fork() -> int:
    """Returns the exit code of a forked process that computes."""
    if not (process := forked.fork_to_compute()):
        ones = torch.ones(64, 64, device="cpu")
        os._exit(int(ones.mm(ones).sum()) != 64**3)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_what_was_forked_next_to_threads_that_come_and_go_computes() -> None:
    over = threading.Event()

    def product() -> None:
        torch.mm(torch.ones(7, 4), torch.ones(4, 16))

    def come_and_go() -> None:
        while not over.is_set():
            thread = threading.Thread(target=product)
            thread.start()
            thread.join()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [computed_in_a_fork() for _ in range(60)] == [0] * 60
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("waits", ["spinning", "asleep"])
def test_one_that_comes_upon_a_lock_is_ended_and_another_is_forked(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_CPU_S", 0.1)
    monkeypatch.setattr(forked, "_WALL_S", 2.0)
    right = forked.compute

    def compute(matrix: object) -> object:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) <= 2:
            while True:
                time.sleep(0.01 if waits == "asleep" else 0)
        return right(matrix)

    monkeypatch.setattr(forked, "compute", compute)
    assert computed_in_a_fork() == 0
    assert len(list(tmp_path.iterdir())) == 3
    for process in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)


def test_after_some_it_is_given_up_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "compute", lambda _: os._exit(1))
    with pytest.raises(ReplicaDied, match="10 processes were forked in vain"):
        forked.fork_to_compute()


def test_what_cannot_be_shown_is_not_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the new process fails in what it shows: nothing of the caller goes on in it."""

    def fails(_: object) -> None:
        raise KeyboardInterrupt

    here = os.getpid()
    monkeypatch.setattr(forked, "compute", fails)
    with pytest.raises(ReplicaDied, match="in vain"):
        forked.fork_to_compute()
    assert os.getpid() == here


def test_the_default_device_is_of_no_interest() -> None:
    with torch.device("meta"):
        assert computed_in_a_fork() == 0


def test_a_time_limit_of_the_callers_own_stays() -> None:
    mine = signal.signal(signal.SIGVTALRM, lambda *_: None)
    try:
        if not (process := forked.fork_to_compute()):
            os._exit(not callable(signal.getsignal(signal.SIGVTALRM)) or signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    finally:
        signal.signal(signal.SIGVTALRM, mine)
