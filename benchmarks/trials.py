"""Trials of hyperparameters: two at a time against one after the other.

All make the same trials of `examples/trials.py`. Beside `paceline tune` there are the parallel searches of Optuna and
of Ray Tune (`make peers`), with an objective that starts the script, as their users do. What scheduling costs is
measured by `trial_starts`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.peers import PEERS
from benchmarks.processes import Failed

TITLE = "Seconds for trials of the digits example"
EXAMPLE = str(Path(__file__).parent.parent / "examples" / "trials.py")
RATES = (0.0003, 0.001, 0.003, 0.01)
WIDTHS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Size:
    rates: Sequence[float]
    widths: Sequence[int]
    epochs: int

    @property
    def trials(self) -> int:
        return len(self.rates) * len(self.widths)


SIZES = {
    "full": Size(RATES, WIDTHS, epochs=6),
    "quick": Size(RATES[:2], WIDTHS[:2], epochs=3),
    "tiny": Size(RATES[:2], WIDTHS[:2], epochs=1),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    one, two = (f"paceline tune --parallel {count}" for count in (1, 2))
    optuna = "Optuna, n_jobs=2, starting the script"
    ray = "Ray Tune, 2 CPUs, starting the script"
    contestants: dict[str, Callable[[], float]] = {
        one: partial(_tune, size, 1),
        two: partial(_tune, size, 2),
        optuna: partial(_optuna, size),
    }
    peer, missing = PEERS["Ray Tune"], ()
    if peer.version() is not None:
        contestants[ray] = partial(_ray, size)
    else:
        missing = ("Ray Tune is not installed: make peers.",)
    series = time_in_turns(contestants, setting, "s")
    return Result(
        title=f"{TITLE}: {size.trials} of them",
        series=tuple(series.values()),
        claims=(
            Claim(
                text=f"{size.trials} trials two at a time over one after the other",
                rounds=per_round(series[two], series[one]),
                at_most=0.6,
            ),
            Claim(text="paceline tune over Optuna, two at a time", rounds=per_round(series[two], series[optuna])),
            *(
                Claim(text=f"paceline tune over {name}, two at a time", rounds=per_round(series[two], series[which]))
                for name, which in (("Ray Tune", ray),)
                if which in series
            ),
        ),
        notes=missing,
    )


def timed(act: Callable[[Path], None]) -> float:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        began = time.monotonic()
        act(Path(folder))
        return time.monotonic() - began


def finish(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run it to its end, which is noticed at once; what it printed."""
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stderr[-1000:]}")
    return done.stdout


def _tune(size: Size, parallel: int) -> float:
    def search(folder: Path) -> None:
        rates, widths = (",".join(map(str, values)) for values in (size.rates, size.widths))
        flags = ["--param", f"lr={rates}", "--param", f"width={widths}", "--sampler", "grid", "--maximize", "accuracy"]
        flags += ["--parallel", str(parallel), "--folder", str(folder / "out"), "--json"]
        finish(["-m", "paceline", "tune", EXAMPLE, *flags, "--", "--epochs", str(size.epochs)], folder)

    return timed(search)


def _ray(size: Size) -> float:
    rates, widths = (",".join(map(str, values)) for values in (size.rates, size.widths))
    script = str(Path(__file__).parent / "scripts" / "ray_trials.py")
    command = [str(PEERS["Ray Tune"].python), script, sys.executable, EXAMPLE, str(size.epochs), rates, widths]

    def search(folder: Path) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stderr[-1000:]}")

    return timed(search)


def _optuna(size: Size) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def search(folder: Path) -> None:
        grid = {"lr": list(size.rates), "width": list(size.widths)}
        study = optuna.create_study(sampler=optuna.samplers.GridSampler(grid))

        def objective(trial: optuna.Trial) -> float:
            rate, width = (trial.suggest_categorical(name, values) for name, values in grid.items())
            arguments = ["--epochs", str(size.epochs), "--lr", str(rate), "--width", str(width)]
            return float(finish([EXAMPLE, *arguments], folder).split()[1])

        study.optimize(objective, n_trials=size.trials, n_jobs=2)

    return timed(search)
