"""Whoever reads the output of `paceline run` may pause, go, or never have been there: the run does not notice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"
# Replica 0 prints more than any pipe holds; replica 1 dies; replica 2 waits for a request to stop.
FLOOD = """
import os, signal, sys, time
from pathlib import Path
from paceline.exchange.board import Board
from paceline.exchange.words import HostWord
from paceline.run_place import find_place

place = find_place()
board = Board(place.board)
if place.row == 0:
    for number in range(200_000):
        print("line", number)
    Path("printed").touch()
if place.row == 1:
    while not Path("printed").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
while not board.host_get(HostWord.STOP_REQUESTED):
    time.sleep(0.01)
sys.exit(130)
"""
LINES = "".join(f"line {number}\n" for number in range(200_000)).encode()


def start(folder: Path, script: str, *flags: str, **popen: Any) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", MAIN, "run", "train.py", "--run-folder", "run", *flags]
    return subprocess.Popen(command, cwd=folder, env=environment, **popen)


def await_event(folder: Path, name: str) -> dict[str, Any]:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if (path := folder / "run/events.jsonl").exists():
            for event in map(json.loads, path.read_text().splitlines()):
                if event["event"] == name:
                    return dict(event)
        time.sleep(0.01)
    raise AssertionError(f"{name} did not happen")


def test_a_reader_that_pauses_gets_everything_and_nobody_waits_for_it(tmp_path: Path) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(tmp_path, FLOOD, "--replicas", "3", "--quiet", **pipes) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        await_event(tmp_path, "died")
        run.send_signal(signal.SIGINT)
        await_event(tmp_path, "ended")
        time.sleep(0.2)
        assert run.poll() is None, "it waits for its reader"
        assert run.stdout.read() == LINES
        assert run.wait(timeout=30) == 130
        assert b"replica 1 was killed by SIGKILL before its first step; 2 replicas go on\n" in run.stderr.read()


def test_a_second_interrupt_ends_the_wait_for_a_reader_who_never_comes(tmp_path: Path) -> None:
    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which shells have their background jobs ignore

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start(tmp_path, FLOOD, "--replicas", "3", preexec_fn=heed_ctrl_c, **pipes) as run:
        started = await_event(tmp_path, "started")
        await_event(tmp_path, "died")
        run.send_signal(signal.SIGINT)
        await_event(tmp_path, "ended")
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=30) == 130
        assert not psutil.pid_exists(started["pid"])


def test_a_pipe_that_does_not_block_gets_everything(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    script = "for number in range(200_000): print('line', number)\nopen('printed', 'w').close()"
    run = start(tmp_path, script, "--quiet", stdout=writing)
    os.close(writing)
    end = time.monotonic() + 60
    while not (tmp_path / "printed").exists():  # much more than a pipe holds
        assert time.monotonic() < end
        time.sleep(0.01)
    found = b""
    while data := os.read(reading, 1 << 16):
        found += data
        time.sleep(0.002)
    os.close(reading)
    assert run.wait(timeout=5) == 0
    assert found == LINES


def test_without_a_stdout_or_with_a_full_one_the_run_goes_on(tmp_path: Path) -> None:
    for number, (how, said) in enumerate(((">&-", b""), (">/dev/full", b"paceline: stdout cannot be written (No"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.py").write_text("print('to the log')")
        command = f"{sys.executable} -c '{MAIN}' run train.py --run-folder run --quiet {how}"
        ended = subprocess.run(["sh", "-c", command], cwd=folder, stderr=subprocess.PIPE, timeout=20, check=False)
        assert ended.returncode == 0
        assert ended.stderr.startswith(said)
        assert ended.stderr.count(b"\n") == bool(said)
        assert (folder / "run/replica-0.log").read_text() == "to the log\n"
