"""One cell of the table: a training alone and one that is distributed, each in processes of its own, and a verdict."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.zoo.compare import CLOSE, largest_difference
from benchmarks.zoo.models import Model
from benchmarks.zoo.strategies import CUT_DIMS, Strategy
from paceline.watch.run_folder import Failure, failure_name

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train.py")
EQUAL, REFUSED, DIFFERENT, TRACEBACK, HANG, DIED, BROKEN = (
    "equal", "refused", "different", "traceback", "hang", "died", "broken",
)  # fmt: skip
VERDICTS = (EQUAL, REFUSED, DIFFERENT, TRACEBACK, HANG, DIED, BROKEN)  # broken: it does not even train alone
PACKAGES = ("torch", "transformers", "torchvision", "timm")
LIMIT_S = 120.0  # of each run, on a machine that has nothing else to do
WAIT_S = 60.0  # the longest that a process of a run waits for another: then Paceline says who waits for whom
LOOK_EVERY_S = 0.2
END_WITHIN_S = 20.0
MOST_WORDS = 400  # of a sentence that is quoted


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one architecture under one strategy."""

    model: str
    strategy: str
    verdict: str
    words: str  # how equal; the sentence of a refusal; the last line of a traceback; what is different
    command: str
    seconds: float
    code: str  # a fingerprint of Paceline's source and the zoo's
    packages: str = ""  # the versions of what the models are made of


@dataclass(frozen=True)
class Ended:
    """A run that has ended, or was ended because it did not: then `code` is None."""

    code: int | None
    output: str


class Judged(Exception):
    """Ends a cell before its comparison."""

    def __init__(self, verdict: str, words: str) -> None:
        self.verdict, self.words = verdict, words


def fingerprint(*paths: str) -> str:
    """A number for the state of all Python files there, but for those that only show what was found."""
    found = hashlib.sha256()
    for file in sorted(file for path in paths for file in (ROOT / path).rglob("*.py")):
        if file.parent == SCRIPT.parent and file.name in ("table.py", "__main__.py"):
            continue
        found.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]


def code_now() -> str:
    """A number for the state of the code that cells depend on."""
    return fingerprint("paceline", "benchmarks/zoo")


def run_cell(model: Model, strategy: Strategy, folder: Path, *, limit_s: float = LIMIT_S) -> Cell:
    """Runs one cell in `folder`, where the output of all its processes stays: `*.txt`."""
    began, code = time.monotonic(), code_now()
    place = folder / f"{model.name}-{strategy.name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    flags = list(strategy.flags)
    try:
        if strategy.asks_for_dims:
            flags = strategy.flags_for(_dims(model, strategy, place, limit_s))
        if strategy.twice:
            expected = _distributed(model, strategy, flags, place, "first", limit_s)
        else:
            expected = _alone(model, strategy, folder, limit_s)
        found = _distributed(model, strategy, flags, place, "run", limit_s)
        largest = largest_difference(expected, found, statistics=strategy.statistics)
        bound = 0.0 if strategy.twice else CLOSE
        verdict = EQUAL if largest.relative <= bound else DIFFERENT
        words = f"{largest.relative:.1e}" + (f" in {largest.where}" if largest.relative else "")
    except Judged as judged:
        verdict, words = judged.verdict, judged.words
    for model_file in place.rglob("*.safetensors"):
        model_file.unlink()
    return Cell(
        model=model.name,
        strategy=strategy.name,
        verdict=verdict,
        words=" ".join(words.split())[:MOST_WORDS],
        command=_typed(flags, strategy.arguments(model)),
        seconds=round(time.monotonic() - began, 1),
        code=code,
        packages=", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _typed(flags: Sequence[str], arguments: Sequence[str]) -> str:
    return shlex.join(["paceline", "run", str(SCRIPT.relative_to(ROOT)), *flags, "--", *arguments])


# ── the runs of a cell ───────────────────────────────────────────────────────────────────────────────────────


def _alone(model: Model, strategy: Strategy, folder: Path, limit_s: float) -> Path:
    """What one process comes to. It is kept for other strategies that are compared with the same."""
    arguments = strategy.arguments_alone(model)
    code = fingerprint("paceline/loop", "benchmarks/zoo")
    place = folder / "alone" / "".join([*arguments, "-", code])
    if not (place / "done").exists():
        for older in (folder / "alone").glob("".join([*arguments, "-*"])):
            shutil.rmtree(older)
        place.mkdir(parents=True)
        ended = _run([sys.executable, str(SCRIPT), *arguments, "--out", str(place)], place / "alone.txt", limit_s)
        if ended.code is None:
            raise Judged(BROKEN, f"one process alone did not end within {limit_s:g} s")
        if ended.code != 0:
            raise Judged(BROKEN, f"one process alone: {_last_line(ended.output)}")
        (place / "done").touch()
    return place


def _dims(model: Model, strategy: Strategy, place: Path, limit_s: float) -> list[list[str]]:
    """The names that the dims of every parameter have."""
    arguments = ["dims", str(SCRIPT), "--json", "--", *strategy.arguments(model)]
    ended = _run([sys.executable, "-m", "paceline", *arguments], place / "dims.txt", limit_s)
    if ended.code is None:
        raise Judged(HANG, f"`paceline dims` did not end within {limit_s:g} s")
    if ended.code != 0:
        raise judged_by_output(ended, "`paceline dims`: ")
    told = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    if not set(told["dims"]) & set(CUT_DIMS):
        raise Judged(REFUSED, f"`paceline dims` has none of {', '.join(CUT_DIMS)}; it has {', '.join(told['dims'])}")
    return [re.split("[ ·]", parameter["dims"]) for parameter in told["parameters"]]


def _distributed(
    model: Model, strategy: Strategy, flags: Sequence[str], place: Path, name: str, limit_s: float
) -> Path:
    """What the strategy comes to: the folder of its model and losses."""
    out, run_folder = place / f"{name}-out", place / name
    out.mkdir()
    command = [sys.executable, "-m", "paceline", "run", str(SCRIPT), *flags, "--run-folder", str(run_folder), "--plain"]
    command += ["--timeout", f"{WAIT_S * _crowd():.0f}", "--", *strategy.arguments(model), "--out", str(out)]
    ended = _run(command, place / f"{name}.txt", limit_s)
    if ended.code == 0:
        return out
    failures = [msgspec.json.decode(path.read_bytes(), type=Failure) for path in run_folder.glob(failure_name("*"))]
    if ended.code is None:
        waiting = "".join(f"; {failure.sentence}" for failure in failures)
        raise Judged(HANG, f"it did not end within {limit_s:g} s{waiting}")
    if not failures:
        raise judged_by_output(ended)
    first = min(failures, key=lambda failure: failure.time)
    if not first.expected:
        raise Judged(TRACEBACK, f"{_last_line(first.sentence)} ({_where(first.traceback)})")
    raise Judged({"Stalled": HANG, "ReplicaDied": DIED}.get(first.kind, REFUSED), first.sentence)


def _run(command: Sequence[str], output: Path, limit_s: float) -> Ended:
    """Runs a command to its end or its limit; nothing that it started is left."""
    ours = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with output.open("w") as stream:
        stream.write(f"$ {shlex.join(command)}\n")
        stream.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ours, "PYTHONPATH": paths},
            cwd=output.parent,
            start_new_session=True,
        )
        try:
            code = _wait(child, limit_s)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGQUIT)  # `paceline run` ends all of its own at once
                with suppress(subprocess.TimeoutExpired):
                    child.wait(END_WITHIN_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return Ended(code, output.read_text(errors="replace"))


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Returns the exit code; None at the limit. Seconds count less on a machine that is crowded."""
    used_s, seen = 0.0, time.monotonic()
    while used_s < limit_s:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_EVERY_S)
        used_s += (time.monotonic() - seen) / _crowd()
        seen = time.monotonic()
    return None


def _crowd() -> float:
    """How many processes want each core, at least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


# ── what is said of them ─────────────────────────────────────────────────────────────────────────────────────


def judged_by_output(ended: Ended, prefix: str = "") -> Judged:
    """A verdict on a run that failed and left nothing but its output."""
    ours = re.findall(r"^paceline\.errors\.\w+: (.*)", ended.output, re.MULTILINE)
    if ours:
        return Judged(REFUSED, prefix + ours[-1])
    if "Traceback (most recent call last)" in ended.output:
        raised = re.findall(r"^([\w.]+(?:Error|Exception|Interrupt)\b.*)", ended.output, re.MULTILINE)
        return Judged(
            TRACEBACK, f"{prefix}{raised[-1] if raised else _last_line(ended.output)} ({_where(ended.output)})"
        )
    if ended.code is not None and (ended.code < 0 or ended.code > 128):
        return Judged(DIED, f"{prefix}exit code {ended.code}: {_last_line(ended.output)}")
    return Judged(REFUSED, prefix + _last_line(ended.output).removeprefix("paceline: "))


def _where(traceback: str) -> str:
    """The innermost line of Paceline or the zoo in a traceback."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in', traceback)
    ours = [f"{Path(path).relative_to(ROOT)}:{line}" for path, line in frames if Path(path).is_relative_to(ROOT)]
    inside = [place for place in ours if place.startswith(("paceline/", "benchmarks/"))]
    return inside[-1] if inside else "no line of ours"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
