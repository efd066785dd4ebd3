"""What many tests start: a script under `paceline run`, and what is to be known of it afterwards.

Scripts tell what they found by `print(json.dumps(…))`, a line each. Every replica's lines are in its log, so that a
test can compare what the replicas say.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm_process import MAIN, SCRIPT, WarmProcesses

TESTS = Path(__file__).parent
# Some virtual machines report AMX and trap its instructions: torch's own products of bf16 (Muon's) would end the test.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Graphs that are kept: for this run of the tests alone.
os.environ["PACELINE_CACHE"] = _kept = tempfile.mkdtemp(prefix="paceline-tests-")
atexit.register(shutil.rmtree, _kept, ignore_errors=True)
# Hundreds of processes are started: none but the first compiles what it imports of ours (0.35 s of each otherwise).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# With several workers, a file each, these come first: else one of them would have the last worker work on alone.
LONGEST = (
    "contract/test_contract.py",
    "cli/test_verify.py",
    "test_faults.py",
    "split/test_wavefront.py",
    "split/test_layouts.py",
    "contract/test_resume_matrix.py",
    "test_script_habits.py",
    "test_findings.py",
    "test_counted_runs.py",
    "test_collectives.py",
    "test_trainer.py",
    "search/test_tune.py",
    "split/test_stages.py",
    "split/test_serve.py",
    "central/test_server_faults.py",
    "test_examples.py",
    "split/test_bad_input.py",
    "test_one_sided_calls.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, and the others as they come."""
    turn = {str(TESTS / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(str(item.path), len(LONGEST)))


def pytest_collection_finish() -> None:
    """Python's collector need not go through torch and all tests again and again."""
    gc.collect()
    gc.freeze()


def environment_of_runs() -> dict[str, str]:
    """Threads of torch cost more than they give at these sizes, and one process must not differ from several."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment


WARM = WarmProcesses(environment_of_runs())
atexit.register(WARM.close)


class Run:
    """A `paceline` command in a folder of its own, still running until `end`."""

    def __init__(self, folder: Path, *arguments: str, stdin: int | None = None) -> None:
        self.folder = folder
        environment = environment_of_runs()
        self.process: subprocess.Popen[str] = WARM.start(
            arguments, str(folder), environment, stdin
        ) or subprocess.Popen(
            arguments,
            cwd=folder,
            env=environment,
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.began = time.monotonic()

    def end(self, timeout_s: float = 90.0) -> Run:
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGQUIT)  # ends everything at once
            out, err = self.process.communicate(timeout=30)
            pytest.fail(f"still running after {timeout_s:g} s:\n{out}\n{err}", pytrace=False)
        self.seconds = time.monotonic() - self.began
        self.code = self.process.returncode
        return self

    def fine(self, timeout_s: float = 90.0) -> Run:
        """The end of a run in which nothing went wrong."""
        self.end(timeout_s)
        assert self.code == 0, self.err
        return self

    # ── what it said ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def log(self, replica: int) -> str:
        (path,) = self.path.rglob(f"replica-{replica}.log")  # each host but the first has a folder inside
        return path.read_text()

    def said(self, replica: int) -> list[dict[str, Any]]:
        """The JSON lines that this replica printed, or the one process without replicas."""
        text = self.log(replica) if self.path.exists() else self.out
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def told(self, key: str, replica: int = 0) -> Any:
        """The one value that this replica gave for `key`."""
        (found,) = (line[key] for line in self.said(replica) if key in line)
        return found

    def all_told(self, key: str, replica: int = 0) -> list[Any]:
        """Every value that this replica gave for `key`, in order."""
        return [line[key] for line in self.said(replica) if key in line]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "events.jsonl").read_text().splitlines()]

    def count(self, event: str) -> int:
        return sum(entry["event"] == event for entry in self.events)

    @property
    def sentence(self) -> str:
        """The one sentence, of all that was said, by which a failing run explains itself."""
        lines = [line for line in self.err.splitlines() if line and not line.startswith("paceline: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]

    # ── what it left ─────────────────────────────────────────────────────────────────────────────────────────

    def assert_nothing_left(self) -> None:
        """No process of the run, and so none of its anonymous memory; no file in /dev/shm; no emulated host."""
        started = {entry["pid"] for entry in self.events if entry["event"] in ("started", "restarted")}
        end = time.monotonic() + 30
        while left := [pid for pid in psutil.pids() if self._belongs(pid, started)]:
            assert time.monotonic() < end, f"still there: {[psutil.Process(pid).cmdline() for pid in left]}"
            time.sleep(0.02)
        shared = os.listdir("/dev/shm")
        assert not [name for name in shared if "paceline" in name or any(f"_{pid}_" in name for pid in started)]
        assert not list(Path("/run/netns").glob(f"paceline-{self.process.pid}-*"))

    def _belongs(self, pid: int, started: set[int]) -> bool:
        try:
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            maps = Path(f"/proc/{pid}/maps").read_text()
            ours = str(self.path) in process.environ().get("PACELINE_PLACE", "")
            return ours or (pid in started and "memfd:paceline" in maps)
        except (psutil.Error, OSError):
            return False


Start = Callable[..., Run]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start(script, "--replicas 2", "--its own arguments")`: the script under `paceline run`, in a new folder.

    `script` is a path, or the text of one. With `flags=None` it is one process, as `paceline verify` starts it: what
    plain `python script` does, in half the time (`tests/test_examples.py` has that).
    """
    runs: list[Run] = []

    def start(script: str | Path, flags: str | None = "", arguments: str = "", *, folder: Path | None = None) -> Run:
        folder = folder or tmp_path_factory.mktemp("run")
        if isinstance(script, str):
            (folder / "train.py").write_text(script)
            script = Path("train.py")
        command = [sys.executable, "-m", SCRIPT, str(script)]
        if flags is not None:
            command = [sys.executable, "-c", MAIN, "run", str(script), "--run-folder", "run", "--quiet"]
            command += [*shlex.split(flags), "--"]
        runs.append(Run(folder, *command, *shlex.split(arguments)))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:  # its test has failed before its end
            run.process.send_signal(signal.SIGQUIT)
        run.process.communicate(timeout=30)  # of one that its test has killed, the pipes are still open
