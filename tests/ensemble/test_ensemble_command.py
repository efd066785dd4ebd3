"""`paceline ensemble`: members of a script measured together, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.cli import main

SCRIPT = """
import argparse
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--samples", type=int, default=90)
options = parser.parse_args()
x = torch.randn(options.samples, 6, generator=torch.Generator().manual_seed(7))
y = (x @ torch.randn(6, 3, generator=torch.Generator().manual_seed(8))).argmax(1)
model = nn.Sequential(nn.Linear(6, options.width), nn.Tanh(), nn.Linear(options.width, 3))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()

def both(model, batch):
    logits = model(batch[0])
    total = F.cross_entropy(logits, batch[1], reduction="sum")
    return {"loss": (total, len(logits)), "accuracy": accuracy(model, batch)}

trainer = pl.Trainer(model, torch.optim.Adam(model.parameters()), loss)
trainer.resume("last.safetensors")
for batch in trainer.batches((x, y), 10, epochs=2):
    raise SystemExit("this must not be reached: nothing is trained")
trainer.save("last.safetensors")
trainer.evaluate((x, y), accuracy, batch_size=40)
trainer.evaluate((x, y), accuracy, batch_size=40, name="accuracy")
trainer.evaluate((x, y), both, batch_size=40, name="validation")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three members, of which one is wider and says so in a file beside it."""
    made = tmp_path_factory.mktemp("ensemble")
    (made / "train.py").write_text(SCRIPT)
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(9))
    y = (x @ torch.randn(6, 3, generator=torch.Generator().manual_seed(8))).argmax(1)
    for member, (width, steps) in enumerate(((8, 12), (8, 25), (16, 12))):
        torch.manual_seed(member)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        save_file(model.state_dict(), made / f"m{member}.safetensors")
    (made / "m2.json").write_text('{"arguments": ["--width", "16"], "metrics": {"accuracy": 0.5}, "seed": 4}')
    return made


def judge(folder: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", "ensemble", "m0.safetensors", "m1.safetensors", "m2.safetensors"]
    done = subprocess.run(
        [*command, "--script", "train.py", "--json", *flags],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def reference(folder: Path) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The members' logits on the validation set, by plain torch."""
    from safetensors.torch import load_file

    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(7))
    y = (x @ torch.randn(6, 3, generator=torch.Generator().manual_seed(8))).argmax(1)
    logits = []
    for member, width in enumerate((8, 8, 16)):
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
        model.load_state_dict(load_file(folder / f"m{member}.safetensors"))
        logits.append(model(x).detach())
    return logits, y


def test_members_and_their_mean_are_what_plain_torch_says(folder: Path) -> None:
    found = judge(folder)
    logits, y = reference(folder)
    right = [(one.argmax(1) == y) for one in logits]
    assert [row["value"] for row in found["members"]] == pytest.approx([float(one.float().mean()) for one in right])
    combined = torch.stack([one.softmax(1) for one in logits]).mean(0).argmax(1) == y
    assert found["value"] == pytest.approx(float(combined.float().mean()))
    best = max(range(3), key=lambda member: int(right[member].sum()))
    assert found["best"] == f"m{best}"
    assert found["better"]["better_on"] == int((combined & ~right[best]).sum())
    assert found["better"]["worse_on"] == int((~combined & right[best]).sum())
    assert (found["better"]["test"], found["paired_by"], found["samples"]) == ("McNemar", "sample", 90)
    assert (found["outputs"], found["metric"]) == ("logits", "accuracy")
    assert found["members"][2]["metrics"] == {"accuracy": 0.5}
    assert not (folder / "last.safetensors").exists()


def test_one_number_of_several_that_is_better_if_it_is_less(folder: Path) -> None:
    found = judge(folder, "--metric", "validation/loss", "--minimize", "--combine", "stacked")
    logits, y = reference(folder)
    losses = [float(nn.functional.cross_entropy(one, y)) for one in logits]
    assert [row["value"] for row in found["members"]] == pytest.approx(losses, rel=1e-5)
    assert found["best"] == f"m{losses.index(min(losses))}"
    assert found["better"]["test"] == "bootstrap"
    assert len(found["weights"]) == 3
    # Fitted on other samples than it is judged by, and still no worse than equal shares of the logarithms are.
    equal = torch.stack([one.log_softmax(1) for one in logits]).mean(0)
    assert found["value"] < float(nn.functional.cross_entropy(equal, y))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["ensemble", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    return said[0].removeprefix("paceline: ")


def test_one_sentence_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "text.safetensors").write_text("this is no checkpoint")
    (folder / "m9.safetensors").write_bytes((folder / "m0.safetensors").read_bytes())
    (folder / "m9.json").write_text('{"arguments": "--width 64"}')
    script = ("--script", "train.py")
    two = ("m0.safetensors", "m1.safetensors")
    assert refused(capsys, *script) == "checkpoints is []: give at least two, as in top/*.safetensors"
    assert refused(capsys, two[0], two[0], *script) == "checkpoints is 'm0.safetensors': give each of them once"
    assert refused(capsys, two[0], "none.safetensors", *script).startswith("none.safetensors is no file: give")
    assert refused(capsys, two[0], "text.safetensors", *script).startswith("text.safetensors is no checkpoint (")
    assert refused(capsys, two[0], "m9.safetensors", *script).startswith("m9.json cannot be read as what belongs to")
    assert refused(capsys, *two, *script, "--combine", "best").startswith("combine is 'best': give one of mean, maj")
    assert refused(capsys, *two, *script, "--outputs", "text").startswith("outputs is 'text': give one of logits")
    assert refused(capsys, *two, "--script", "trian.py").startswith("script is 'trian.py': there is no such file, did")
    assert refused(capsys, two[0], "m2.safetensors", *script, "--", "--width", "8").startswith(
        "arguments after -- is '--width 8': m2.json has others for m2"
    )


def test_what_only_the_script_can_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    shutil.copy("m2.safetensors", "wide.safetensors")
    script = ("--script", "train.py")
    assert refused(capsys, "m0.safetensors", "wide.safetensors", *script).startswith(
        "wide.safetensors has '0.weight' of shape [16, 6], and the model of [8, 6]: give the model it is of (made with"
    )
    assert refused(capsys, "m0.safetensors", "m1.safetensors", *script, "--metric", "acuracy") == (
        "metric is 'acuracy': train.py tells none of this name, but 'accuracy'"
    )
    shutil.copy("m1.safetensors", "other.safetensors")
    Path("other.json").write_text('{"arguments": ["--samples", "80"]}')
    assert "that of the first member is another" in refused(capsys, "m0.safetensors", "other.safetensors", *script)
    assert refused(capsys, "m0.safetensors", "m1.safetensors", *script, "--", "--wide").startswith(
        "train.py --wide ended with exit code 2 before it evaluated anything: train.py: error: "
    )
