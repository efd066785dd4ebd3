"""What cannot be cut, or is not what it seems when it is, is said in one sentence that names line, module or dim.

All that is refused under the same flags is tried in one launch, one script after another: to start the devices takes
longer than any of them. That what is refused ends a run with this sentence alone is tried once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run, Start

NET = """
import torch, torch.nn as nn
import paceline as pl
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.third, self.fourth = nn.Linear(6, 10), nn.Linear(10, 3)
        self.norm = nn.LayerNorm(6)
        self.calls = 0
    def forward(self, x):
        FORWARD
        return self.fourth(torch.tanh(self.third(self.norm(self.second(torch.tanh(self.first(x)))))))
model = Net()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: LOSS)
for batch in trainer.batches(BATCH, batch_size=4):
    trainer.step(batch)
"""
GOOD = {"FORWARD": "", "LOSS": "model(x).square().mean()", "BATCH": "torch.randn(8, 6)"}

CONV = """
import torch, torch.nn as nn, paceline as pl
torch.manual_seed(0)
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.round()
    @staticmethod
    def backward(ctx, dy): return dy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
    def forward(self, x):
        return self.second(ROUNDED(self.first(x)))
def penalized(model, x):
    x = x.requires_grad_()
    found = model(x).square().mean()
    (slope,) = torch.autograd.grad(found, x, create_graph=True)
    return found + slope.square().sum()
model = Net()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS)
EVALUATE
for batch in trainer.batches(torch.randn(8, 1, 8, 8), batch_size=4):
    trainer.step(batch)
"""
OWN_BACKWARD = {"ROUNDED": "Rounded.apply", "LOSS": "lambda model, x: model(x).square().mean()", "EVALUATE": ""}
OF_A_GRADIENT = {"ROUNDED": "torch.tanh", "LOSS": "penalized", "EVALUATE": ""}
EVALUATE = f"trainer.evaluate(torch.randn(8, 1, 8, 8), {OWN_BACKWARD['LOSS']}, batch_size=4)"

CHANGING = """
import torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
temperature = 1.0
def loss(model, x):
    return model(x).square().mean() * temperature
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
for batch in trainer.batches(torch.randn(56, 6), batch_size=8):
    trainer.step(batch)
    temperature = 1.0 if trainer.steps < 5 else 0.9
"""

STAGES, TILES = "--stages 2 --micro-batches 2", "--tiles 2"
HIDDEN, CHANNELS = "--mesh model=2 --layout hidden=model", "--mesh model=2 --layout channels=model"


def script(text: str, changed: dict[str, str]) -> str:
    for name, value in changed.items():
        text = text.replace(name, value)
    return text


def net(**changed: str) -> str:
    return script(NET, {**GOOD, **changed})


# The flags, the script, and what it is told; by the name of the script's file.
REFUSED: dict[str, tuple[str, str, str]] = {
    "decides": (
        STAGES,
        net(FORWARD="x = x if x.sum() > 0 else -x"),
        "decides.py:13 (x = x if x.sum() > 0 else -x), so it cannot be cut: it decides by the values of a tensor",
    ),
    "a_number": (
        STAGES,
        net(LOSS="model(x).mean().item()"),
        "'a number that .item() has given': return the scalar tensor",
    ),
    "no_samples": (
        STAGES,
        net(BATCH="[{'scale': float(n)} for n in range(8)], collate=lambda rows: rows[0]",
            LOSS="model(torch.ones(6)).sum()"),
        "batch is 'dict': it has no tensors with a dim of samples to make micro-batches of",
    ),
    "changes_a_parameter": (
        STAGES,
        net(FORWARD="self.first.weight.detach().clamp_(-1, 1)"),
        "model is 'Net': clamp_ changes its parameter first.weight in place while the loss is computed",
    ),
    "own_backward_in_stages": (STAGES, script(CONV, OWN_BACKWARD), "--replicas"),
    "a_vector": (
        HIDDEN,
        net(LOSS="model(x).square().mean(1)"),
        "loss is 'a tensor of shape (4,)': return its mean, a scalar",
    ),
    "without_the_model": (
        HIDDEN,
        net(LOSS="x.mean()"),
        "loss is 'nothing that follows from the model': return a scalar tensor, or",
    ),
    "changes_from_step_to_step": (HIDDEN, CHANGING, "gives another loss than when it is called"),
    "of_a_gradient_in_parts": (CHANNELS, script(CONV, OF_A_GRADIENT), "--replicas"),
    # What is computed first is not the loss then.
    "evaluated_first": (CHANNELS, script(CONV, {**OWN_BACKWARD, "EVALUATE": EVALUATE}),
                        "gives another gradient of first"),
    "own_backward_in_tiles": (TILES, script(CONV, OWN_BACKWARD), "--replicas"),
    "of_a_gradient_in_tiles": (TILES, script(CONV, OF_A_GRADIENT), "--replicas"),
}  # fmt: skip
# Stages and layouts are made of the same graph.
SELDOM: dict[str, tuple[str, str, str]] = {
    "of_a_gradient_in_stages": ("--stages 2", script(CONV, OF_A_GRADIENT), "--replicas"),
    "own_backward_in_parts": (CHANNELS, script(CONV, OWN_BACKWARD), "--replicas"),
}
TOLD = {  # what is cut, and told about
    "prints": (
        HIDDEN,
        net(FORWARD="self.calls += 1; print('called')"),
        "it prints at prints.py:13; it changes calls of the model: once a graph, not in every step",
    ),
    "some_layers": (
        HIDDEN,
        net(),
        "only some layers have hidden, first.weight say; hidden2 in third.weight stay whole: lay them",
    ),
}
ONE_AFTER_ANOTHER = """
import json, runpy, sys
import paceline as pl
for name in sys.argv[1:]:
    try:
        runpy.run_path(f"{name}.py", run_name="__main__")
        told = None
    except pl.PacelineError as error:
        told = str(error)
    print(json.dumps({name: told}))
"""


@pytest.fixture(scope="module")
def launched(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The one run of all scripts that have these flags: each device tells, by name, what it was refused with."""
    runs: dict[str, Run] = {}

    def run_with(flags: str) -> Run:
        if flags not in runs:
            folder: Path = tmp_path_factory.mktemp("scripts")
            texts = {name: text for name, (asked, text, _) in {**REFUSED, **TOLD}.items() if asked == flags}
            for name, text in texts.items():
                (folder / f"{name}.py").write_text(text)
            runs[flags] = start(ONE_AFTER_ANOTHER, flags, " ".join(texts), folder=folder).fine()
        return runs[flags]

    return run_with


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_on_every_device(name: str, launched: Callable[[str], Run]) -> None:
    flags, _, sentence = REFUSED[name]
    for device in (0, 1):
        assert sentence in launched(flags).told(name, device)


@pytest.mark.parametrize("name", TOLD)
def test_what_is_cut_and_not_what_it_seems_is_told(name: str, launched: Callable[[str], Run]) -> None:
    flags, _, sentence = TOLD[name]
    run = launched(flags)
    assert [run.told(name, device) for device in (0, 1)] == [None, None]
    assert sentence in run.err


@pytest.mark.parametrize("name", ["decides", *(pytest.param(name, marks=pytest.mark.soak) for name in SELDOM)])
def test_what_is_refused_ends_the_run_with_its_sentence(start: Start, name: str) -> None:
    flags, text, sentence = {**REFUSED, **SELDOM}[name]
    run = start(text, flags).end()
    assert run.code != 0
    assert sentence.replace(f"{name}.py", "train.py") in run.err
    assert "Traceback" not in run.err
