"""Serving a cut model: in one plain process that has devices of its own, and inside a run."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from conftest import Start
from serve_cases import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def predictors(start: Start) -> dict[str, str | None]:
    """What went wrong in each case; None where nothing did."""
    run = start(HERE / "serve_cases.py", flags=None).end(110)
    said = {line["case"]: line["wrong"] for line in run.said(0)}
    assert said, run.err
    return said


@pytest.mark.parametrize("name", CASES)
def test_one_plain_process(predictors: dict[str, str | None], name: str) -> None:
    assert predictors[name] is None, predictors[name]


FOR_EVER = """
import json, os, sys, time
import torch
import paceline as pl

predictor = pl.load(None, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), split=pl.Stages(stages=2))
print(json.dumps({"caller": os.getpid()}), flush=True)
while True:
    predictor(torch.ones(2, 4))
    print(json.dumps({"answered": True}), flush=True)
"""


def test_devices_end_with_a_caller_that_is_killed(start: Start) -> None:
    run = start(FOR_EVER, flags=None)
    assert run.process.stdout is not None
    while "answered" not in (line := run.process.stdout.readline()):
        assert line or run.process.poll() is None, run.process.communicate()
    devices = psutil.Process(run.process.pid).children()
    assert len(devices) == 1
    run.process.kill()
    run.process.communicate(timeout=30)  # until nobody holds its output open any more
    assert not psutil.wait_procs(devices, timeout=30)[1]


TRAINING = """
import json
import torch
import torch.nn.functional as F
import paceline as pl

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(6, 11), torch.nn.Linear(11, 3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x))))

torch.manual_seed(0)
model = Mlp()
loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, dims={"fc1.weight": "middle inputs"})
predictor = trainer.predictor()
request = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
first = predictor(request)
data = torch.randn(16, 6, generator=torch.Generator().manual_seed(2)), torch.ones(16, 3)
for batch in trainer.batches(data, 8):
    trainer.step(batch)
assert model.training
answer = predictor(request)
assert model.training and not answer.requires_grad
trainer.save("model.safetensors")
plain = Mlp()
with pl.load("model.safetensors", plain) as loaded:
    wanted = loaded(request)
print(json.dumps({
    "first": first.tolist(), "answer": answer.tolist(), "close": torch.allclose(answer, wanted, atol=1e-6),
    "learned": not torch.allclose(first, answer),
}))
"""


@pytest.mark.parametrize("flags", ["--mesh model=2 --layout middle=model", "--stages 2"])
def test_a_trainer_predicts(start: Start, flags: str) -> None:
    run = start(TRAINING, flags).fine()
    for process in range(2):
        assert run.told("close", process)
        assert run.told("learned", process)
        assert run.told("answer", process) == run.told("answer", 0)  # the whole answer on every device
        assert run.told("first", process) == run.told("first", 0)


def test_servers_do_not_predict(start: Start) -> None:
    run = start(TRAINING, "--replicas 1 --servers 1").end()
    assert run.sentence == ("predictor is 'with servers': call trainer.predict, or save the model and use pl.load")
