"""Faults that read as sentences.

    kill(replica=1).at(step=3).in_("backward")
    kill_host(of=4).at(step=5).in_("update")
    cut_off(host_of=2).at(step=1).in_("waiting")

A test gives them to a script as JSON. There the process that is meant arms itself, and kills itself with SIGKILL at
exactly that moment and in the worst possible way: in the middle of an update it first scribbles over everything the
update may write to. Each fault happens once; several of one replica happen one after another, each to the process that
was started in the place of the one before. A fault that has happened leaves a file, for the test to see that it has.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.exchange.board import Board
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import Phase, Word
from paceline.memory.model_arena import ModelArena
from paceline.mirrored import between_hosts
from paceline.mirrored.owner import Owner

# Moments that the script announces itself …
IN_THE_SCRIPT = ("start", "forward", "backward", "evaluation", "between")
# … and those inside Paceline.
INSIDE = {
    "building": "it has made or opened the shared memory, and has not said so",
    "statistics": "before its part of BatchNorm's statistics is there",
    "statistics of backward": "the same in backward",
    "waiting": "its gradient is there, and it begins to wait for the others'",
    "completing": "(several hosts) it has all that comes from others, and has not said so",
    "deciding": "all gradients are there, nothing is updated",
    "norm": "before it has measured its part of the gradient's length",
    "reducing": "(under distribute) the mean has been written over some of the gradients it was made from",
    "update": "one chunk is updated, the next is half written",
    "adoption": "it has half written a chunk of an owner that died",
    "closing": "its own updates are complete, and it begins to wait for the others'",
    "saving": "the training file has its name, the model file does not",
    "joining": "started again, it waits to be admitted",
    "bringing": "hosts are let in, and the run's state is about to be brought to them",
    "brought": "the same, and it has been",
    "admitted": "started again and admitted, it has not read what it missed",
}


@dataclass(frozen=True)
class Fault:
    """Who is killed, and when."""

    replica: int
    step: int = 0
    moment: str = "between"
    what: str = "replica"  # that is killed; or all of its host, or only its host's link or its host stopped

    def at(self, step: int) -> Fault:
        return replace(self, step=step)

    def in_(self, moment: str) -> Fault:
        assert moment in IN_THE_SCRIPT or moment in INSIDE, moment
        return replace(self, moment=moment)


def kill(replica: int) -> Fault:
    return Fault(replica)


def kill_host(of: int) -> Fault:
    """All processes of an emulated host, its supervisor among them."""
    return Fault(of, what="host")


def cut_off(host_of: int) -> Fault:
    """The link of an emulated host falls silent: nothing is closed, and all processes go on."""
    return Fault(host_of, what="link")


def stop_host(of: int) -> Fault:
    """All processes of an emulated host are stopped, until somebody has them go on."""
    return Fault(of, what="stopped")


def processes_beside(process: int | str = "self") -> list[int]:
    """Those on the same emulated host, which is that one's network namespace."""
    here = os.readlink(f"/proc/{process}/ns/net")
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/net") == here:
                found.append(int(name))
    return found


def as_argument(faults: Sequence[Fault]) -> str:
    """One word of a command line."""
    return shlex.quote(json.dumps([asdict(fault) for fault in faults]))


def from_argument(text: str) -> list[Fault]:
    return [Fault(**fault) for fault in json.loads(text)]


def happened(folder: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Those of the faults that have happened to a script that ran in `folder`."""
    return [fault for number, fault in enumerate(faults) if (folder / _mark(number)).exists()]


def _mark(number: int) -> str:
    return f"fault-{number}-has-happened"


# ── inside the process that is meant ─────────────────────────────────────────────────────────────────────────


def arm(faults: Sequence[Fault], replica: int, steps: Callable[[], int]) -> Callable[[str], None]:
    """Let this process die of its next fault. `steps` tells how many updates have been made so far.

    Returns what the script calls at the moments that only it knows.
    """
    for number, fault in enumerate(faults):
        if fault.replica == replica and not Path(_mark(number)).exists():
            return _arm(fault, Path(_mark(number)), steps)
    return lambda moment: None


def _arm(fault: Fault, mark: Path, steps: Callable[[], int]) -> Callable[[str], None]:
    def die(*_: Any, **__: Any) -> None:
        if mark.exists():
            return
        mark.touch()
        if fault.what == "link":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            return
        number = signal.SIGSTOP if fault.what == "stopped" else signal.SIGKILL
        for process in processes_beside() if fault.what != "replica" else ():
            if process != os.getpid():
                os.kill(process, number)
        os.kill(os.getpid(), number)

    def due() -> bool:
        return steps() == fault.step

    def before(owner: Any, name: str, act: Callable[..., None]) -> None:
        """Once the step has come, call `act` before each call of `owner.name`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if due():
                act(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def scribble_and_die(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.detach().fill_(float("nan"))
                for value in optimizer.state[parameter].values():
                    if isinstance(value, torch.Tensor):
                        value.fill_(float("nan"))
        die()

    def overwrite_and_die(*_: Any, out: torch.Tensor) -> None:
        out.fill_(float("nan"))
        die()

    def at_second(act: Callable[..., None]) -> Callable[..., None]:
        calls: list[None] = []

        def counted(*args: Any, **kwargs: Any) -> None:
            calls.append(None)
            if len(calls) == 2:
                act(*args, **kwargs)

        return counted

    match fault.moment:
        case "building":
            before(Board, "hold_arena", die)
        case "statistics":
            before(SharedSums, "sum", die)
        case "statistics of backward":
            before(SharedSums, "sum", at_second(die))
        case "waiting":
            before(Board, "await_arrivals", die)
        case "completing":
            before(Together, "decide", die)
        case "deciding":
            before(Owner, "begin", die)
        case "norm":
            before(Owner, "norm", die)
        case "reducing":
            before(torch, "mul", at_second(overwrite_and_die))
        case "update":
            before(torch.optim.SGD, "step", at_second(scribble_and_die))
        case "adoption":
            before(Owner, "_put_back", lambda *_: before(torch.optim.SGD, "step", scribble_and_die))
        case "closing":
            before(Owner, "update", lambda *_: before(Board, "wait", die))
        case "saving":
            before(os, "replace", at_second(die))
        case "joining":
            before(Board, "wait", lambda board, rank, phase, *_: phase == Phase.AWAITING_ADMISSION and die())
        case "bringing":
            before(between_hosts, "bring_state", die)
        case "brought":
            before(between_hosts, "bring_state", lambda *_, **__: before(Together, "decide", die))
        case "admitted":
            before(ModelArena, "read_notes", die)

    def reached(moment: str) -> None:
        if moment == fault.moment and due():
            die()

    return reached


def await_return(board: Board) -> None:
    """Until whoever was killed has been started again and waits to be admitted, which the next step does."""
    end = time.monotonic() + 60
    while not all(board.alive(rank) or _is_ready(board, rank) for rank in range(board.replicas)):
        assert time.monotonic() < end, board.who_waits()
        time.sleep(0.01)


def _is_ready(board: Board, rank: int) -> bool:
    return board.get(rank, Word.JOINING) == board.get(rank, Word.INCARNATION)
