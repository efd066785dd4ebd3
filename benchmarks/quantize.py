"""`paceline quantize`: how much smaller the file is, how much faster one core answers, what the digits lose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Claim, Result, Series, Setting, take_turns
from benchmarks.processes import SCRIPTS, Failed

TITLE = "Models in int8"
SMALLER = 3.5
FASTER = 1.5
MOST_LOST = 0.5  # points
DIGITS = "Digits"
MANY = 32  # samples that an answer has beside one of one

Figures = dict[str, float]


@dataclass(frozen=True)
class Quantized:
    """A script, its arguments, and the flags of `paceline quantize`."""

    name: str
    script: Path
    arguments: list[str]
    flags: list[str] = field(default_factory=list)

    def measure(self) -> Figures:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            path = str(Path(folder) / "model.safetensors")
            script = str(self.script)
            _output([sys.executable, script, *self.arguments, "--save", path])
            command = [sys.executable, "-m", "paceline", "quantize", path, "--script", script, "--json", *self.flags]
            report: dict[str, Any] = json.loads(_output([*command, "--", *self.arguments]))
        before, after = report["before"], report["after"]
        many = max(before["ms"], key=int)
        return {
            "smaller": before["bytes"] / after["bytes"],
            "faster": before["ms"]["1"] / after["ms"]["1"],
            "faster, many": before["ms"][many] / after["ms"][many],
            "lost": report["drop"],
            "float, ms": before["ms"]["1"],
            "int8, ms": after["ms"]["1"],
        }


def _made(model: str, width: int, depth: int) -> Quantized:
    sizes = [model, "--width", str(width), "--depth", str(depth)]
    name = f"{'MLP' if model == 'mlp' else 'Transformer of 32 words'}, {width} wide, {depth} deep"
    return Quantized(name, SCRIPTS / "quantized.py", sizes, ["--max-drop", "100"])


def _digits(epochs: int) -> Quantized:
    script = Path(__file__).parent.parent / "examples" / "digits.py"
    return Quantized(DIGITS, script, ["--epochs", str(epochs)])


SIZES = {
    "full": (_made("mlp", 1024, 4), _made("transformer", 512, 4), _digits(20)),
    "quick": (_made("mlp", 1024, 2), _made("transformer", 512, 1), _digits(2)),
    "tiny": (_made("mlp", 16, 1), _made("transformer", 16, 1)),
}


def run(setting: Setting) -> Result:
    contestants = SIZES[setting.scale]
    found = take_turns({it.name: partial(it.measure) for it in contestants}, setting, _shown)
    claims, series = [], []
    for name, rounds in found.items():

        def figures(key: str, rounds: list[Figures] = rounds) -> tuple[float, ...]:
            return tuple(one[key] for one in rounds)

        claims.append(Claim(text=f"{name}: the file, times smaller", rounds=figures("smaller"), at_least=SMALLER))
        if name == DIGITS:
            text = f"{name}: points of accuracy that are lost"
            claims.append(Claim(text=text, rounds=figures("lost"), at_most=MOST_LOST))
        else:
            text = f"{name}: one sample on one core, faster than float32"
            claims.append(Claim(text=text, rounds=figures("faster"), at_least=FASTER))
            text = f"{name}: {MANY} samples on one core, faster than float32"
            claims.append(Claim(text=text, rounds=figures("faster, many")))
        series += [Series(f"{name}, {kind}", "ms a sample", figures(f"{kind}, ms")) for kind in ("float", "int8")]
    notes = (
        "One thread, processor time, float32 and int8 in turns in one process; sizes of files are those of `ls`.",
        f"This processor has {_instructions()}.",
    )
    return Result(title=TITLE, series=tuple(series), claims=tuple(claims), notes=notes)


def _shown(figures: Figures) -> str:
    return f"{figures['smaller']:.2f}× smaller, {figures['faster']:.2f}× faster, {figures['lost']:.2f} points lost"


def _instructions() -> str:
    """What of the instructions for products of int8 there is."""
    known = {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx_vnni": "AVX-VNNI",
        "avx512_vnni": "AVX-512 VNNI",
        "amx_int8": "AMX",
    }
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return ", ".join(name for flag, name in known.items() if flag in flags) or "none of AVX2, VNNI and AMX"


def _output(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"{' '.join(command[:4])} … ended with {run.returncode}: {run.stderr[-500:]}")
    return run.stdout
