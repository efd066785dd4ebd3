"""`paceline plan`, `calibrate`, `run --auto`: what is refused; and a script planned, run and learned from for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.cli import main
from paceline.plan.calibration import fingerprint, read, write
from tests.plan.made_up import calibration

SCRIPT = """
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters()), loss)
for batch in trainer.batches((torch.randn(640, 16), torch.randint(4, (640,))), batch_size=16, epochs=3):
    trainer.step(batch)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write(calibration(), tmp_path / "cache" / "calibration.json")
    Path("train.py").write_text(SCRIPT)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence with which the command line refuses."""
    assert main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hosts", "4"], "hosts is 4: say what is between them, --link 1gbit"),
        (["--hosts", "4", "--link", "fast"], "link is 'fast': give a rate such as 100mbit, 1gbit"),
        (["--hosts", "2000", "--link", "1gbit"], "hosts is 2000: give 1 to 1024"),
        (["--link", "1gbit"], "one host has nobody to send to"),
        (["--device", "a10"], "device is 'a10': give one of a100"),
        (["--devices", "4"], "say which, --device with one of k80"),
        (["--emulate", "hosts=2,link=1gbit", "--cores", "2"], "--emulate says that, leave it out"),
        (["--plot", "speed.gif"], "give a file that ends in .png or .svg"),
        (["--plot", "nowhere/speed.png"], "its folder does not exist"),
        (["--hosts", "2", "--link", "1gbit", "--check"], "cannot be run here"),
        (["--calibration", "nothing.json"], "make one with `paceline calibrate`"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, "plan", "train.py", *arguments)


def test_without_a_calibration_it_says_how_to_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    (Path("cache") / "calibration.json").unlink()
    assert "run `paceline calibrate` once" in refused(capsys, "plan", "train.py")
    assert "run `paceline calibrate` once" in refused(capsys, "run", "train.py", "--auto")


def test_a_calibration_of_another_machine_is_used_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.plan import find_calibration

    write(calibration(machine="another"), Path("other.json"))
    assert find_calibration("other.json").machine == "another"
    said = capsys.readouterr().err
    assert "of another machine (another; this is" in said
    assert "`paceline calibrate`" in said


def test_a_calibration_that_was_made_beside_other_programs_is_used_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from paceline.cli.plan import find_calibration

    for load, said in ((0.1, ""), (1.3, "other programs used 1.3 cores while this machine was calibrated")):
        write(calibration(load=load), Path("busy.json"))
        find_calibration("busy.json")
        found = capsys.readouterr().err
        assert said in found
        assert ("other programs" in found) == bool(said)


def test_a_script_without_a_trainer_is_told_how_to_add_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("print('no trainer here')")
    said = refused(capsys, "plan", "train.py")
    assert "never made a step with a pl.Trainer" in said
    assert "trainer.batches(" in said
    Path("train.py").write_text("raise ValueError('no data')")
    assert "ended before its first step: ValueError: no data" in refused(capsys, "plan", "train.py")


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--replicas", "2"], "replicas"), (["--nnodes", "2"], "hosts"), (["--bounded", "0"], "bounded")],
)
def test_auto_decides_alone(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"leave out --{named}" in refused(capsys, "run", "train.py", "--auto", *flags)


def test_a_machine_is_made_up_from_one_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --out FILE" in refused(capsys, "calibrate", "--cores", "16")
    assert "give --cores too" in refused(capsys, "calibrate", "--memory", "16")
    assert main(["calibrate", "--cores", "16", "--memory", "64", "--out", "big.json"]) == 0
    made = read(Path("big.json"))
    assert (made.cores, made.memory_bytes, made.made_up) == (16, 64 * 2**30, True)
    assert main(["calibrate", "--show"]) == 0
    assert "shared, 2" in capsys.readouterr().out


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=100)


def test_a_script_is_planned_run_as_planned_and_learned_from() -> None:
    """Planning trains nothing; the run after it has the prediction beside its own step, and adds to what is known."""
    told = json.loads(paceline("plan", "train.py", "--budget", "2", "--json", "--plot", "speed.svg").stdout)
    assert told["profile"]["parameters"] == 16 * 32 + 32 + 64 + 32 * 4 + 4
    assert (told["profile"]["batch_size"], told["profile"]["batchnorms"]) == (16, 1)
    assert {share["threads"] for share in told["profile"]["shares"]} >= {1}
    assert told["command"][0].startswith("paceline run train.py --replicas ")
    assert told["best"]["step"][1] <= told["best"]["step"][0] <= told["best"]["step"][2]
    assert Path("speed.svg").read_text().startswith("<?xml")
    assert not Path("runs").exists()
    ran = paceline("run", "train.py", "--auto", "--json", "--plain")
    outcome = json.loads(ran.stdout.splitlines()[-1])
    assert outcome["steps"] == 120
    assert outcome["measured_s"] > 0
    assert outcome["low_s"] <= outcome["predicted_s"] <= outcome["high_s"]
    assert "auto: " in ran.stderr
    assert "a step took" in ran.stdout + ran.stderr
    learned = read(Path("cache") / "calibration.json").learned
    was_disturbed = not 1 / 4 < outcome["measured_s"] / outcome["predicted_s"] < 4  # of such a run nothing is learned
    assert sum(factor.runs for factor in learned.values()) == (0 if was_disturbed else 1)
    changed = msgspec.structs.replace(read(Path("cache") / "calibration.json"), learned={})
    assert (changed, changed.machine) == (calibration(), fingerprint())
