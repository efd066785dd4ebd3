"""A script that ends without having saved loses nothing: its model is in the run folder, and the run says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import MAIN, Run
from safetensors.torch import load_file

from paceline.cli import main

TRAIN = """
import json, sys, torch, paceline as pl
torch.manual_seed(0)
def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    loss = lambda model, x: (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    for batch in trainer.batches(data, 8, epochs=2):
        trainer.step(batch)
    if "save" in sys.argv:
        trainer.save("saved.safetensors")
    print(json.dumps({key: value.tolist() for key, value in model.state_dict().items()}))
    if "fail" in sys.argv:
        raise KeyError("in what comes after the training")
train()  # the trainer is nobody's when the process ends
"""


def ran(folder: Path, flags: str, arguments: str) -> Run:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-c", MAIN, "run", "train.py", "--run-folder", "run", "--plain", "--json"]
    return Run(folder, *command, *flags.split(), "--", *arguments.split()).end()


@pytest.mark.parametrize(
    ("flags", "arguments", "code"),
    [
        ("--replicas 2", "fail", 1),
        ("--servers 1", "", 0),
        pytest.param("", "", 0, marks=pytest.mark.soak),
        pytest.param("--servers 2 --replicas 2", "fail", 1, marks=pytest.mark.soak),
    ],
    ids=["mirrored, fails after training", "servers", "one process", "servers, replicas fail"],
)
def test_the_model_of_a_forgotten_save_is_in_the_run_folder(
    tmp_path: Path, flags: str, arguments: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ran(tmp_path / "here", flags, arguments)
    assert run.code == code
    command = "the script never called trainer.save; the model is kept in the run folder: paceline container save run "
    assert command in run.err
    outcome = json.loads(run.out.splitlines()[-1])
    assert outcome["saved"] is None
    assert len(outcome["kept"]) == 1
    monkeypatch.chdir(run.folder)
    assert main(["container", "save", "run", "again.safetensors"]) == 0
    expected = json.loads(next(line for line in run.log(0).splitlines() if line.startswith("{")))
    for key, value in load_file("again.safetensors").items():
        assert torch.equal(value, torch.tensor(expected[key])), key


@pytest.mark.soak
def test_a_run_that_has_saved_keeps_nothing(tmp_path: Path) -> None:
    run = ran(tmp_path / "here", "", "save")
    assert "never called" not in run.err
    outcome = json.loads(run.out.splitlines()[-1])
    assert (outcome["saved"], outcome["kept"]) == ("saved.safetensors", [])


def test_a_folder_without_a_kept_model_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    assert main(["container", "save", "run", "again.safetensors"]) == 2
    said = capsys.readouterr().err
    assert "run folder is 'run': it holds no model: a run keeps it if its script has saved none" in said
    assert main(["container", "save", "nowhere", "again.safetensors"]) == 2
    assert "at is 'missing': give the addresses of servers" in capsys.readouterr().err
