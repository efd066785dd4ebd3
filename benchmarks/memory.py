"""How much memory a model takes that is trained by four replicas: PSS of all processes together.

PSS counts a page that n processes share as 1/n for each, so the sum over the processes is what they really take. The
same training with a model of next to nothing is measured as well: what torch and Python take. What is left, after the
gradients, which every replica has to have, is parameters and optimizer state; divided by the size of one set of
them, it is the number of copies that are held.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, take_turns
from benchmarks.processes import Failed, Process
from benchmarks.training import Training, read_marks

TITLE = "Memory of a 400 MB model under AdamW, 4 replicas"
MOST_COPIES = 1.1  # one, and a little for activations and what is in flight
STATES = 2  # AdamW keeps two numbers a parameter
IDLE_STEPS = 300
MB = 1e6


@dataclass(frozen=True)
class Memory:
    """PSS in bytes: of processes' own memory, of mapped files (libraries), of shared memory."""

    anonymous: int
    files: int
    shared: int

    @property
    def total(self) -> int:
        return self.anonymous + self.files + self.shared

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.anonymous + other.anonymous, self.files + other.files, self.shared + other.shared)


@dataclass(frozen=True)
class Size:
    training: Training
    replicas: int = 4

    @property
    def idle(self) -> Size:
        """The same with a model of next to nothing, for long enough to look at it several times."""
        training = self.training
        epochs = -(-IDLE_STEPS // (training.warm_up + training.steps))
        return replace(self, training=replace(training, width=8, depth=1, epochs=epochs))

    @property
    def model_bytes(self) -> int:
        width, depth = self.training.width, self.training.depth
        weights = 784 * width + (depth - 1) * width * width + 10 * width
        return 4 * (weights + depth * width + 10)

    def paceline(self) -> Memory:
        flags = ["--replicas", str(self.replicas)]
        return self._largest(
            lambda times: [processes.paceline("train_paceline.py", self.training.arguments(times), flags)]
        )

    def ddp(self) -> Memory:
        return self._largest(
            lambda times: processes.ranks(
                "train_ddp.py", [*self.training.arguments(times), "--bucket-view"], self.replicas
            )
        )

    def _largest(self, start: Callable[[Path], Sequence[Process]]) -> Memory:
        """The most that all processes took together at one moment after the warm-up."""
        largest = Memory(0, 0, 0)
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"

            def look(pids: list[int]) -> None:
                nonlocal largest
                if len(read_marks(times)) >= self.training.warm_up:
                    largest = max(largest, pss(pids), key=lambda memory: memory.total)

            processes.run(start(times), meanwhile=look)
        if not largest.total:
            raise Failed("the training was over before its memory could be looked at")
        return largest


SIZES = {
    "full": Size(Training("mlp", 1024, 96, batch_size=8, steps=6, warm_up=3, optimizer="adamw")),
    "quick": Size(Training("mlp", 1024, 10, batch_size=8, steps=30, warm_up=3, optimizer="adamw")),
    "tiny": Size(Training("mlp", 256, 4, batch_size=2, steps=100, warm_up=1, optimizer="adamw"), replicas=2),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    runs = take_turns(
        {
            "Paceline": size.paceline,
            "DDP, bucket view": size.ddp,
            "Paceline, idle": size.idle.paceline,
            "DDP, bucket view, idle": size.idle.ddp,
        },
        setting,
        lambda memory: f"{memory.total / MB:,.0f} MB",
    )
    series = [one for name in ("Paceline", "DDP, bucket view") for one in split(name, runs, size)]
    ours, theirs = (
        tuple(
            copies(memory.total, idle.total, size)
            for memory, idle in zip(runs[name], runs[f"{name}, idle"], strict=True)
        )
        for name in ("Paceline", "DDP, bucket view")
    )
    claims = [
        Claim(text="Memory: copies of parameters and optimizer state", rounds=ours, at_most=MOST_COPIES),
        Claim(text="Memory: the same for DDP", rounds=theirs),
    ]
    notes = [
        f"{size.replicas} replicas. One set of parameters is {size.model_bytes / MB:,.0f} MB, of AdamW's state "
        f"{STATES * size.model_bytes / MB:,.0f} MB, of gradients {size.model_bytes / MB:,.0f} MB a replica. "
        "Copies = (all − the idle run − gradients) / (parameters + state), launcher included, at the largest."
    ]
    return Result(title=TITLE, series=tuple(series), claims=tuple(claims), notes=tuple(notes))


def split(name: str, runs: dict[str, list[Memory]], size: Size) -> Iterator[Series]:
    """What the memory consists of."""
    gradients = size.replicas * size.model_bytes
    pairs = list(zip(runs[name], runs[f"{name}, idle"], strict=True))
    parts: dict[str, Callable[[Memory, Memory], float]] = {
        "all processes together": lambda memory, _: memory.total,
        "of it shared memory": lambda memory, _: memory.shared,
        "of it processes' own": lambda memory, _: memory.anonymous,
        "idle: torch and Python": lambda _, idle: idle.total,
        "parameters and state: without idle and gradients": lambda memory, idle: memory.total - idle.total - gradients,
    }
    for part, measured in parts.items():
        yield Series(f"{name}, {part}", "MB", tuple(measured(memory, idle) / MB for memory, idle in pairs))


def copies(total: int, idle: int, size: Size) -> float:
    """How many sets of parameters and optimizer state there are."""
    return (total - idle - size.replicas * size.model_bytes) / ((1 + STATES) * size.model_bytes)


def pss(pids: Sequence[int]) -> Memory:
    """Of these processes and everything they have started."""
    total = Memory(0, 0, 0)
    for pid in pids:
        # One that has just ended takes nothing any more.
        with suppress(FileNotFoundError, ProcessLookupError):
            total += parse_rollup(Path(f"/proc/{pid}/smaps_rollup").read_text())
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            total += pss([int(child) for child in children])
    return total


def parse_rollup(text: str) -> Memory:
    """What the kernel says of one process, in /proc/PID/smaps_rollup."""
    sizes = {line.partition(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
    return Memory(*(1024 * int(sizes[name]) for name in ("Pss_Anon", "Pss_File", "Pss_Shmem")))
