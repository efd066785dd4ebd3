"""`paceline quantize` from a script to a served model, and one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl
from paceline import checkpoint
from paceline.cli import main
from tests.quantize.models_to_quantize import has_int8

SCRIPT = """
import argparse
import torch, torch.nn.functional as F
from torch import nn
from sklearn.datasets import load_digits
import paceline as pl

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
width = options.width
model = nn.Sequential(nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()

def both(model, batch):
    return {"loss": loss(model, batch), "accuracy": accuracy(model, batch)}

trainer = pl.Trainer(model, torch.optim.Adam(model.parameters(), lr=0.003), loss)
for batch in trainer.batches((x[:1500], y[:1500]), 100, epochs=6):
    raise SystemExit("this must not be reached: nothing is trained")
trainer.evaluate((x[1500:], y[1500:]), accuracy, name="accuracy")
trainer.evaluate((x[1500:], y[1500:]), both, name="both")
"""
pytestmark = pytest.mark.timeout(300)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def net(width: int = 64) -> nn.Module:
    layers = [nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, and a model as it trains one."""
    made = tmp_path_factory.mktemp("quantize")
    (made / "train.py").write_text(SCRIPT)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:1500], dtype=torch.float32) / 16, torch.tensor(labels[:1500])
    model = net().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    checkpoint.write(made / "model.safetensors", model.state_dict(), {}, {})
    return made


def quantize(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "quantize", "model.safetensors", "--script", "train.py", *flags]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=280
    )


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    done = quantize(folder, "--json", "--plot", "layers.svg", "--export", "onnx")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_digits_in_int8_lose_half_a_point_at_most(folder: Path, report: dict[str, Any]) -> None:
    before, after = report["before"], report["after"]
    assert before["value"] > 0.85
    assert report["drop"] == pytest.approx(100 * (before["value"] - after["value"]))
    assert report["drop"] <= 0.5
    assert before["bytes"] == (folder / "model.safetensors").stat().st_size
    assert after["bytes"] == (folder / "model-int8.safetensors").stat().st_size
    assert before["bytes"] / after["bytes"] >= 3
    assert set(before["ms"]) == set(after["ms"]) == {"1", "32"}
    assert [layer["name"] for layer in report["layers"] if layer["int8"]] == ["0", "3"]
    assert "<svg" in (folder / "layers.svg").read_text()


def test_the_onnx_file_gives_the_same_answers_in_onnxruntime(folder: Path, report: dict[str, Any]) -> None:
    import onnx
    import onnxruntime

    assert report["onnx"]["difference"] < 0.01
    assert report["onnx"]["value"] == pytest.approx(report["after"]["value"], abs=0.005)
    path = str(folder / "model-int8.onnx")
    graph = onnx.load(path).graph
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 2
    assert {tensor.data_type for tensor in graph.initializer} >= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    session = onnxruntime.InferenceSession(path)
    x = torch.rand(5, 64, generator=torch.Generator().manual_seed(3))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = pl.load(folder / "model-int8.safetensors", net())(x)
    assert np.allclose(found, expected.numpy(), atol=0.02 * float(expected.abs().max()))


def test_it_is_served(folder: Path, report: dict[str, Any]) -> None:
    model = net()
    x = torch.rand(1, 64, generator=torch.Generator().manual_seed(3))
    expected = pl.load(folder / "model-int8.safetensors", model)(x)
    assert has_int8(model)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "serve",
        "model-int8.safetensors",
        "--script",
        "train.py",
        "--port",
        "0",
    ]
    server = subprocess.Popen(
        [*command, "--json", "--input", "input:FP32:-1,64"], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        answer = httpx.post(f"http://127.0.0.1:{port}/predict", json=x[0].tolist(), timeout=60).json()
        assert torch.allclose(torch.tensor(answer["outputs"]["output"]), expected, atol=1e-6)
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_the_table_and_samples_of_ones_own(folder: Path, report: dict[str, Any]) -> None:
    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "some.npz", x=images[1500:1540] / 16, y=labels[1500:1540])
    flags = (
        "--data",
        "some.npz",
        "--metric",
        "both/loss",
        "--minimize",
        "--max-drop",
        "50",
        "--out",
        "own.safetensors",
    )
    done = quantize(folder, *flags, "--float", "3", "--activations", "dynamic")
    assert done.returncode == 0, done.stderr
    assert "on 40 samples" in done.stdout
    assert "both/loss" in done.stdout
    assert "In float: 3, --float 3." in done.stdout
    assert "own.safetensors" in done.stdout


def test_what_only_the_script_shows_is_one_sentence_too(folder: Path) -> None:
    done = quantize(folder, "--", "--width", "65")
    assert done.returncode == 2
    sentence = "model.safetensors has '0.weight' of shape [64, 64], and the model of [65, 64]: give the model it is of"
    assert done.stderr == f"paceline: {sentence}\n"


AT_ONCE = {
    "none.safetensors": "model is 'none.safetensors': there is no such file",
    "train.py": "model is 'train.py': give a file that ends in .safetensors",
    ".": "model is '.': this is a folder",
    "model.safetensors --max-drop lots": "max-drop is 'lots': give a number of points from 0 up, such as 0.5",
    "model.safetensors --max-drop -1": "max-drop is '-1'",
    "model.safetensors --activations some": "activations is 'some': give calibrated or dynamic",
    "model.safetensors --export tflite": "export is 'tflite': give onnx",
    "model.safetensors --out model.safetensors": "out is 'model.safetensors': give another name",
    "model.safetensors --out model.bin": "out is 'model.bin': give a file name that ends in .safetensors",
    "model.safetensors --out no/model.safetensors": "its folder does not exist",
    "model.safetensors --data train.py": "data is 'train.py': give a file that ends in .npz or .safetensors",
    "model.safetensors --plot layers.gif": "plot is 'layers.gif'",
    "model.safetensors --samples 0": "samples is '0'",
}


@pytest.mark.parametrize("given", AT_ONCE)
def test_what_is_wrong_is_said_before_anything_is_started(
    folder: Path, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["quantize", *given.split(), "--script", "train.py"]) == 2
    assert AT_ONCE[given] in capsys.readouterr().err
