"""Hosts join a mirrored run: late, or again after their death, by the same command; deaths while they do; and what cannot
be joined is refused. Each host is a network namespace, and each death is real.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checksum import largest_difference
from conftest import TESTS, Run, Start
from faults import Fault, as_argument, happened, kill, kill_host
from launch.test_host_deaths import may_emulate

SCRIPT = TESTS / "faulty_training.py"
ROUNDING = 1e-5
END_S = 170.0
EPOCHS, STEPS = 5, 25

pytestmark = pytest.mark.skipif(not may_emulate(), reason="emulated hosts need root and iproute2")


def wait_until(ready: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@dataclass
class Joined:
    """A run that waits for a line before each epoch, and the hosts that were started later."""

    run: Run
    lines: Path
    later: list[subprocess.Popen[str]] = field(default_factory=list)

    def go_on(self, epochs: int) -> None:
        with self.lines.open("a") as file:
            file.write("go\n" * epochs)

    def start(self, host: int) -> subprocess.Popen[str]:
        """Starts a host, by the command of host 0 but for its number."""
        config = self.run.path / "config.json"
        wait_until(lambda: config.exists() and config.read_text().endswith("}\n"))
        command = subprocess.list2cmdline  # noqa: F841
        import json

        words = json.loads(config.read_text())["command"][1:]
        words[words.index("--node-rank") + 1] = str(host)
        (namespace,) = Path("/run/netns").glob(f"paceline-{self.run.process.pid}-*-h{host}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        full = ["ip", "netns", "exec", namespace.name, sys.executable, "-m", "paceline", *words]
        self.later.append(
            subprocess.Popen(
                full,
                cwd=self.run.folder,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return self.later[-1]

    def events(self) -> str:
        path = self.run.path / "events.jsonl"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def alone(start: Start) -> Run:
    return start(SCRIPT, None, f"--epochs {EPOCHS}").fine(END_S)


def test_thin(start: Start, alone: Run, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("")
    run = start(
        SCRIPT,
        "--replicas 6 --emulate hosts=2:3,link=1gbit --timeout 120",
        f"--epochs {EPOCHS} --epoch-a-line {lines}",
    )
    joined = Joined(run, lines)
    try:
        wait_until(lambda: '"step"' in joined.events() or run.process.poll() is not None)
        third = joined.start(2)
        wait_until(lambda: '"host came"' in joined.events())
        time.sleep(8)
        joined.go_on(EPOCHS)
        run.fine(END_S)
        out, err = third.communicate(timeout=60)
        print(run.err, "\n----\n", out, err)
        assert third.returncode == 0
        assert '"host joined"' in joined.events()
        assert largest_difference(alone.folder / "last.safetensors", run.folder / "last.safetensors") < ROUNDING
    finally:
        for process in joined.later:
            process.kill()
