"""Starting a script as a user of each peer would, with the same cores, threads and malloc for all.

A replica of `paceline run` is pinned to its share of the cores, has as many threads, and keeps the memory it has once
touched. Ranks of torch.distributed get exactly the same, and so does a lone process that is compared with one of
several replicas: what malloc alone gains is not counted as Paceline's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.forked import end_with_parent
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.memory.heap import KEPT_BYTES

SCRIPTS = Path(__file__).parent / "scripts"
LONGEST_RUN_S = 900.0
LOOK_EVERY_S = 0.1
_TAIL_LINES = 15


class Failed(Exception):
    """A contestant ended badly; the message ends with its last words."""


@dataclass(frozen=True)
class Process:
    """A command, and where it runs. Without `cores` it may run on all of them."""

    command: Sequence[str]
    cores: tuple[int, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def alone(script: str, arguments: Sequence[str], which: int = 0, of: int = 2) -> Process:
    """Plain python, on the cores that replica `which` of `of` would have."""
    cores = share_of_cores(which, of, allowed_cores())
    return Process(_python(script, arguments), cores, _alike(len(cores)))


def paceline(script: str, arguments: Sequence[str], flags: Sequence[str], *, share_of: int = 1) -> Process:
    """`paceline run`, which pins its replicas itself. `share_of`: on the cores that one of so many would have."""
    run = [_installed("paceline"), "run", str(SCRIPTS / script), *flags, "--", *arguments]
    return Process(run, share_of_cores(0, share_of, allowed_cores()))


def torchrun(script: str, arguments: Sequence[str], ranks: int) -> Process:
    """`torchrun` as its documentation shows it for one machine."""
    flags = ["--standalone", "--nproc-per-node", str(ranks)]
    return Process([_installed("torchrun"), *flags, str(SCRIPTS / script), *arguments], None, _alike(1))


def command(*words: str) -> Process:
    """Any other command of `paceline`, free to run on all cores."""
    return Process([_installed("paceline"), *words])


def knows(subcommand: str, flag: str) -> bool:
    """Whether this `paceline` has that flag."""
    asked = subprocess.run([_installed("paceline"), subcommand, "--help"], capture_output=True, text=True, check=False)
    return flag in asked.stdout.split()


def of_peer(python: Path, script: str, arguments: Sequence[str]) -> Process:
    """A script of a system with a runtime of its own, as it comes: on all cores as its own scheduler likes, a thread a
    process, memory as it sees fit."""
    return Process([str(python), str(SCRIPTS / script), *arguments], None, _threads(1))


def ranks(
    script: str,
    arguments: Sequence[str],
    count: int,
    *,
    servers: int = 0,
    hosts: int = 1,
    address: str = "127.0.0.1",
    on_host: Callable[[int, list[str]], list[str]] = lambda _, command: command,
    environment: Mapping[str, str] | None = None,
) -> list[Process]:
    """Ranks of torch.distributed, started with the variables that torchrun would set, and pinned.

    `on_host(host, command)` makes the command one that runs on that host. `servers` more ranks follow, which run where
    they like, as Paceline's servers do.
    """
    local_count = count // hosts
    port = str(free_port())
    processes = []
    for rank in range(count + servers):
        host, local = divmod(rank, local_count)
        cores = share_of_cores(local, local_count, allowed_cores()) if rank < count else tuple(allowed_cores())
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(count + servers),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(local_count),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            **_alike(len(cores)),
            **(environment or {}),
        }
        processes.append(Process(on_host(host, _python(script, arguments)), cores, variables))
    return processes


def run(
    processes: Sequence[Process],
    meanwhile: Callable[[list[int]], None] | None = None,
    *,
    servers: Sequence[Process] = (),
) -> None:
    """Run these together until all have ended. `meanwhile(pids)` is called again and again while they run.

    When one of them fails the others are ended, and nothing that they started is left. `servers` are started before
    them and would run for ever: they are ended when all others have.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        everybody = [*servers, *processes]
        outputs = [Path(folder) / str(number) for number in range(len(everybody))]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for process, output in zip(everybody, outputs, strict=True):
                started.append(_start(process, output, folder))
            _wait(everybody, started, outputs, len(servers), meanwhile)
        finally:
            for child in started:
                _end(child)


def _start(process: Process, output: Path, folder: str) -> subprocess.Popen[bytes]:
    owner = os.getpid()

    def begin() -> None:
        end_with_parent(owner)  # a benchmark that is killed leaves nothing behind
        if process.cores is not None:
            os.sched_setaffinity(0, process.cores)

    with output.open("wb") as stream:
        return subprocess.Popen(
            process.command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **process.environment},
            cwd=folder,  # run folders go there, and with it
            preexec_fn=begin,  # this process has a single thread, so nothing can hold a lock across the fork
            start_new_session=True,
        )


def _wait(
    processes: Sequence[Process],
    started: Sequence[subprocess.Popen[bytes]],
    outputs: Sequence[Path],
    servers: int,
    meanwhile: Callable[[list[int]], None] | None,
) -> None:
    deadline = time.monotonic() + LONGEST_RUN_S
    while True:
        codes = [child.poll() for child in started]
        for process, code, output in zip(processes, codes, outputs, strict=True):
            if code:
                raise Failed(f"`{' '.join(process.command)}` ended with exit code {code}:\n{_last_words(output)}")
        if None not in codes[servers:]:
            return
        if time.monotonic() > deadline:
            raise Failed(f"`{' '.join(processes[servers].command)}` did not end within {LONGEST_RUN_S:.0f} s")
        if meanwhile is not None:
            meanwhile([child.pid for child in started])
        time.sleep(LOOK_EVERY_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """First as Ctrl-C would, so that a launcher ends its own processes, which are in groups of their own."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def _last_words(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _python(script: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, str(SCRIPTS / script), *arguments]


def _installed(command: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / command)


def _alike(threads: int) -> dict[str, str]:
    """What `paceline run` gives to a replica."""
    of_malloc = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(KEPT_BYTES))
    return {**_threads(threads), **of_malloc}


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
