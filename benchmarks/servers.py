"""Push and pull of a dense model of 40 MB through one server, beside TensorFlow, Ray and torch's RPC.

The gradient is there already and the server applies plain SGD: what is measured is the way there and back. Every
replica makes its own steps, one after another; counted are those of all replicas together.

Shared memory is held against the best of all peers, TCP against the best of those that use no shared memory: for that
Ray's server is on another node of its cluster. `COPIES` is what the machine's memory allows for a sync step.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, per_round, steps_per_second, time_in_turns
from benchmarks.peers import PEERS
from benchmarks.training import read_marks

TITLE = "Push and pull of a 40 MB model, plain SGD on one server, one host"
UNIT = "steps/s, all replicas"
SHARED, SYNC, TCP, TLS = (
    "Paceline, shared memory, async",
    "Paceline, shared memory, sync",
    "Paceline, TCP, async",
    "Paceline, mutual TLS, async",
)
RPC, RPC_TCP, TENSORFLOW = "torch RPC", "torch RPC, TCP alone", "TensorFlow ParameterServerStrategy"
RAY, RAY_APART = "Ray actor, shared memory", "Ray actor, another node"
APART = (RPC, TENSORFLOW, RAY_APART)
COPIES = "the copies and the sum alone"
SHARED_LEAST, TCP_LEAST, TLS_LEAST = 8.0, 1.5, 0.35
RPC_TCP_LEAST = 1.0  # with any number of replicas
HELD = 2  # replicas: of these the bars are


@dataclass(frozen=True)
class Size:
    bytes: int
    replicas: tuple[int, ...]
    steps: int  # of a replica
    fast_steps: int  # of one that is through shared memory
    warm_up: int

    def rate(self, start: Callable[[list[str]], None], *, fast: bool = False, files: int, each: int = 1) -> float:
        """Steps a second of what `start(arguments)` runs; it leaves `files` files, each of the steps of `each`."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            steps = self.warm_up + (self.fast_steps if fast else self.steps)
            start(["--bytes", str(self.bytes), "--steps", str(steps), "--times", str(times)])
            marks = [read_marks(times.with_name(f"times.{number}")) for number in range(files)]
            return steps_per_second(marks, self.warm_up * each)

    # ── contestants ──────────────────────────────────────────────────────────────────────────────────────

    def paceline(self, replicas: int, *flags: str, fast: bool) -> float:
        flags = ("--replicas", str(replicas), "--servers", "1", *flags)

        def start(arguments: list[str]) -> None:
            processes.run([processes.paceline("push_paceline.py", arguments, flags)])

        return self.rate(start, fast=fast, files=replicas)

    def paceline_tls(self, replicas: int) -> float:
        def start(arguments: list[str]) -> None:
            with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
                keys, home = Path(folder) / "keys", Path(folder) / "server"
                processes.run([processes.command("keys", "make", str(keys), "--name", "bench")])
                home.mkdir()
                address = f"127.0.0.1:{processes.free_port()}"
                server = ["server", "--listen", address, "--dir", str(home), "--keys", str(keys)]
                flags = ["--replicas", str(replicas), "--async", "--exchange", "tcp"]
                flags += ["--join", address, "--keys", str(keys)]
                processes.run(
                    [processes.paceline("push_paceline.py", arguments, flags)], servers=[processes.command(*server)]
                )

        return self.rate(start, files=replicas)

    def rpc(self, replicas: int, *flags: str) -> float:
        def start(arguments: list[str]) -> None:
            processes.run(processes.ranks("push_rpc.py", [*arguments, *flags], replicas, servers=1))

        return self.rate(start, files=replicas)

    def copies(self, replicas: int) -> float:
        def start(arguments: list[str]) -> None:
            processes.run([processes.alone("push_copies.py", [*arguments, "--replicas", str(replicas)])])

        return self.rate(start, fast=True, files=replicas)

    def ray(self, replicas: int, *flags: str) -> float:
        def start(arguments: list[str]) -> None:
            arguments = [*arguments, "--replicas", str(replicas), *flags]
            processes.run([processes.of_peer(PEERS["Ray"].python, "push_ray.py", arguments)])

        return self.rate(start, files=replicas)

    def tensorflow(self, replicas: int) -> float:
        def start(arguments: list[str]) -> None:
            counts = {"chief": 1, "ps": 1, "worker": replicas}
            ports = iter(processes.free_ports(sum(counts.values())))
            cluster = {task: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for task, count in counts.items()}
            tasks = {
                (task, index): processes.of_peer(
                    PEERS["TensorFlow"].python,
                    "push_tensorflow.py",
                    [*arguments, "--cluster", json.dumps(cluster), "--task", task, "--index", str(index)],
                )
                for task, count in counts.items()
                for index in range(count)
            }
            chief = tasks.pop(("chief", 0))
            processes.run([chief], servers=list(tasks.values()))

        return self.rate(start, files=1, each=replicas)


SIZES = {
    "full": Size(40_000_000, (1, 2), steps=40, fast_steps=150, warm_up=8),
    "quick": Size(40_000_000, (1, 2), steps=12, fast_steps=30, warm_up=4),
    "tiny": Size(40_000, (2,), steps=20, fast_steps=20, warm_up=2),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    notes: list[str] = []
    contestants: dict[str, Callable[[], float]] = {}
    for replicas in size.replicas:
        for name, start in _contestants(size, notes).items():
            contestants[_in(name, replicas)] = partial(start, replicas)
    series = time_in_turns(contestants, setting, UNIT)
    claims = [claim for replicas in size.replicas for claim in _claims(series, replicas)]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=tuple(dict.fromkeys(notes)))


def _contestants(size: Size, notes: list[str]) -> dict[str, Callable[[int], float]]:
    """Those that can run here; of the others `notes` says why not."""
    found: dict[str, Callable[[int], float]] = {
        SHARED: lambda replicas: size.paceline(replicas, "--async", fast=True),
        SYNC: lambda replicas: size.paceline(replicas, fast=True),
        TCP: lambda replicas: size.paceline(replicas, "--async", "--exchange", "tcp", fast=False),
    }
    if processes.knows("run", "--join") and processes.knows("run", "--keys"):
        found[TLS] = size.paceline_tls
    else:
        notes.append(f"Skipped {TLS}: `paceline run` has no --join and --keys.")
    found[RPC] = size.rpc
    found[RPC_TCP] = lambda replicas: size.rpc(replicas, "--tcp")
    found[COPIES] = size.copies
    for name, label, start in (
        ("TensorFlow", TENSORFLOW, size.tensorflow),
        ("Ray", RAY, size.ray),
        ("Ray", RAY_APART, lambda replicas: size.ray(replicas, "--apart")),
    ):
        version = PEERS[name].version()
        if version is None:
            notes.append(f"Skipped {label}: {name} is not installed, `make peers` does it where it can.")
        else:
            notes.append(f"{name} {version}.")
            found[label] = start
    return found


def _claims(series: dict[str, Series], replicas: int) -> list[Claim]:
    def of(name: str) -> Series | None:
        return series.get(_in(name, replicas))

    def best(peers: Sequence[str]) -> Series:
        return max((found for name in peers if (found := of(name))), key=lambda found: found.median)

    held = replicas == HELD
    wanted = (
        ("shared memory, async: steps/s over the best peer's", SHARED, best((*APART, RAY)), SHARED_LEAST),
        ("shared memory, sync: steps/s over the best peer's", SYNC, best((*APART, RAY)), SHARED_LEAST),
        ("shared memory, sync: steps/s over those of the copies and the sum alone", SYNC, of(COPIES), None),
        ("TCP: steps/s over those of the best peer without shared memory", TCP, best(APART), TCP_LEAST),
        ("TCP: steps/s over those of torch RPC over TCP alone", TCP, of(RPC_TCP), RPC_TCP_LEAST),
        ("TCP: steps/s over those of Ray in shared memory", TCP, of(RAY), None),
        ("mutual TLS: steps/s over those of plain TCP", TLS, of(TCP), TLS_LEAST),
    )
    return [
        Claim(
            text=f"Push and pull of 40 MB, {_in(text, replicas)}",
            rounds=per_round(over, under),
            at_least=bar if held or bar == RPC_TCP_LEAST else None,
        )
        for text, name, under, bar in wanted
        if under is not None and (over := of(name)) is not None
    ]


def _in(name: str, replicas: int) -> str:
    return f"{name}, {replicas} replica{'s' if replicas > 1 else ''}"
