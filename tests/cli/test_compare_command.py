"""Comparing strategies: refused before anything starts, measured to a target, stopped and gone on with, in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.compare.answers import answer_all, in_words
from paceline.compare.measuring import Measurement, Point
from paceline.compare.plot import can_plot
from paceline.compare.seeds import find_seeds
from paceline.compare.summary import summarize
from paceline.compare.ways import Defaults, read_ways
from paceline.watch.target import Target

MAIN = "import sys; from paceline.cli import main; sys.exit(main())"
SCRIPT = """
import argparse, time
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--epochs", type=int, default=60)
options = parser.parse_args()
torch.manual_seed(options.seed)
x = torch.randn(120, 8)
y = (x @ torch.randn(8, 1)).squeeze(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def loss(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss)
for epoch in range(options.epochs):
    for batch in trainer.batches((x, y), 24, seed=options.seed):
        trainer.step(batch)
    trainer.evaluate((x, y), loss, name="error")
    trainer.log(ratio=float("nan"))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(["compare", "train.py", *arguments])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1, err
    assert not Path("runs").exists()
    return err.removeprefix("paceline: ").rstrip("\n")


SENTENCES = {
    ("accuracy", "one"): "until is 'accuracy': give a metric, >= or <=, and a number",
    ("accuracy>=high", "one"): "until is 'accuracy>=high': give a metric, >= or <=, and a number",
    ("error<=1", "asink, one"): "strategies is 'asink, one': 'asink' is none, give some of async, one",
    ("error<=1", "accept"): "strategies is 'accept': accept needs a number of replicas, or auto",
    ("error<=1", "mirrored 3"): "strategies is 'mirrored 3': 'mirrored 3' has a word too many",
    ("error<=1", "one x2"): "strategies is 'one x2': one is one replica and not 2, say mirrored x2",
    ("error<=1", "one, one"): "strategies is 'one, one': one is there twice, give it once",
    ("error<=1", "accept 9 x4"): "strategies is 'accept 9 x4': its accept is 9",
    ("error<=1", "mirrored x0"): "strategies is 'mirrored x0': its replicas is '0': give a whole number from 1 up",
    ("error<=1", "mirrored x5000"): "strategies is 'mirrored x5000': its replicas is 5000: give at most 2031 a host",
    ("error<=1", "layout hidden=100"): "strategies is 'layout hidden=100': its split is",
}


@pytest.mark.parametrize(("given", "sentence"), SENTENCES.items())
def test_what_is_wrong_is_said_before_anything_starts(
    given: tuple[str, str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "--until", given[0], "--strategies", given[1]).startswith(sentence)


def test_flags_that_fit_no_strategy_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--until", "error<=1", "--strategies", "one, mirrored x2")
    assert "there is no replica 2 among 2" in refused(capsys, *asked, "--slow", "2:5x")
    assert "slow is '1:0.5x': give replicas and factors above 1" in refused(capsys, *asked, "--slow", "1:0.5x")
    assert "longest is 'soon': give a time above 0" in refused(capsys, *asked, "--longest", "soon")
    assert "repeats is '0'" in refused(capsys, *asked, "--repeats", "0")
    servers = ("--until", "error<=1", "--strategies", "async x3", "--emulate", "hosts=2,link=1gbit")
    assert "strategies is 'async x3': its replicas is 3: give a multiple of 2" in refused(capsys, *servers)


def compare(folder: Path, *flags: str, until: str = "error<=0.4", strategies: str = "one, async x2") -> Any:
    command = ["compare", "train.py", "--until", until, "--strategies", strategies, "--folder", "out", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.soak
def test_a_comparison_that_is_stopped_goes_on_where_it_was(folder: Path) -> None:
    first = compare(folder, "--repeats", "2", "--json")
    end = time.monotonic() + 60
    while not (folder / "out" / "one-0.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert [one["strategy"] for one in json.loads(out)["strategies"]] == ["one"]
    assert "the same command with --folder out goes on" in err
    kept = (folder / "out" / "one-0.json").read_bytes()

    again = compare(folder, "--repeats", "2", "--json")
    out, err = again.communicate(timeout=110)
    assert again.returncode == 0, err
    assert (folder / "out" / "one-0.json").read_bytes() == kept
    assert "one, repeat 1: error<=0.4 after" in err
    assert "(measured before)" in err
    report = json.loads(out)
    assert [(one["strategy"], one["reached"], one["runs"]) for one in report["strategies"]] == [
        ("one", 2, 2),
        ("async x2", 2, 2),
    ]
    alone, servers = report["strategies"]
    assert (alone["staleness"], alone["bytes_sent"]["mean"]) == (None, 0.0)
    assert 0 <= servers["staleness"]["mean"] <= 1  # 0: one replica was through before the other came
    runs = {(one["way"], one["repeat"]): one for one in report["measurements"]}
    assert len(runs) == 4
    for one in runs.values():
        assert one["reached"]
        assert one["curve"][-1][3] <= 0.4 < one["curve"][0][3]
        assert 0 < one["seconds"] < one["wall_seconds"]
        assert one["samples"] == one["updates"] * 24
    assert runs["one", 0]["curve"] != runs["one", 1]["curve"], "seeds differ between repeats"

    (folder / "train.py").write_text(SCRIPT + "# changed")
    other = compare(folder, "--repeats", "2")
    assert "it holds a comparison with text of the script" in other.communicate(timeout=60)[1]
    assert other.returncode == 2
    assert "Is the result any different?" in report["words"]
    assert all(Path(folder, path).stat().st_size for path in report["plots"]) == can_plot()

    other = compare(folder, "--repeats", "3")
    _, err = other.communicate(timeout=60)
    assert (other.returncode, err.count("\n")) == (2, 1)
    assert "folder is 'out': it holds a comparison with repeats 2" in err


def test_a_target_that_is_not_reached_a_script_that_tells_nothing_and_one_without_a_trainer(folder: Path) -> None:
    far = compare(folder, "--repeats", "1", "--most-steps", "12", until="error<=0.000001", strategies="one")
    out, err = far.communicate(timeout=60)
    assert far.returncode == 0, err
    assert "one did not reach error<=1e-06, at best" in " ".join(out.split())
    assert "stopped by --most-steps" in " ".join(out.split())

    (folder / "out").rename(folder / "far")
    nothing = compare(folder, "--repeats", "1", until="eror<=0.4", strategies="one")
    _, err = nothing.communicate(timeout=60)
    assert nothing.returncode == 2
    assert err.splitlines()[-1] == (
        "paceline: eror was never told: the script tells error, ratio; ask for one of them in --until"
    )

    (folder / "out").rename(folder / "nothing")
    (folder / "train.py").write_text("print('no training here')\n")
    none = compare(folder, strategies="one")
    _, err = none.communicate(timeout=60)
    assert none.returncode == 2
    assert "train.py made no step with a pl.Trainer: add trainer = pl.Trainer(model, optimizer, loss)" in err


# ── seeds, and the numbers in words ──────────────────────────────────────────────────────────────────────────────


def test_a_script_is_given_seeds_where_it_takes_them(folder: Path) -> None:
    assert find_seeds("train.py", ["--epochs", "3"], module=False).of(2) == ("--epochs", "3", "--seed", "2")
    assert find_seeds("train.py", ["--seed", "7"], module=False).of(2) == ("--seed", "7")
    assert find_seeds("train.py", ["--random={seed}"], module=False).of(1) == ("--random=1",)
    Path("train.py").write_text("print(1)")
    assert find_seeds("train.py", [], module=False).of(1) == ()


def measured(way: str, repeat: int, seconds: float | None, value: float, samples: int = 1000) -> Measurement:
    return Measurement(
        way=way,
        repeat=repeat,
        command=[],
        exit_code=0,
        reached=seconds is not None,
        seconds=seconds,
        wall_seconds=seconds,
        updates=samples // 10,
        samples=samples,
        value=value,
        best=value,
        stopped_by=None if seconds is not None else "longest",
        curve=[Point(seconds or 1.0, samples, 10, value)],
        names=["accuracy"],
    )


def test_answers_are_yes_no_or_too_close_to_say_by_the_spread() -> None:
    ways = read_ways("sync, async, layout hidden, one", Defaults(2, 1, 2))
    times = {
        "sync": [1.0, 1.1, 0.9],
        "async": [2.0, 2.3, 1.9],
        "layout hidden": [1.0, 3.0, 2.0],
        "one": [2.0, 1.5, 1.6],
    }
    runs = [measured(name, n, time, 0.97 + n / 1e4) for name, found in times.items() for n, time in enumerate(found)]
    summaries, target = summarize(ways, runs), Target.parse("accuracy>=0.97")
    answers = {answer.question: answer.answer for answer in answer_all(summaries, target, to_end=False)}
    assert answers == {
        "Does sync learn more from a sample than async?": "no",
        "Is sync faster than async?": "yes",
        "Does layout hidden help against one device?": "too close to say",
        "Is the result any different?": "no",
    }
    late = [*runs[:3], *(measured("async", repeat, None, 0.9) for repeat in range(3))]
    words = in_words(summarize(ways, late), target, to_end=True)
    assert "Is sync faster than async? Yes: sync reached the target in 3 of 3 runs and async in none." in words
    assert "Does sync end better than async? Yes: accuracy at the end" in words
    assert "async did not reach accuracy>=0.97 in 3 of 3 runs, at best 0.9 ± 0, stopped by --longest." in words
