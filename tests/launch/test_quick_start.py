"""torch's compiler is loaded by those who use it, and then nothing is different from plain torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import Start

START = """
import json, sys
from paceline.launch.quick_start import load_compiler_late
load_compiler_late()
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(4, 3)

def update():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

def loaded():
    return "torch._dynamo" in sys.modules
"""


def run(text: str, before: str = START) -> Any:
    ended = subprocess.run([sys.executable, "-c", before + text], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_optimizers_work_without_the_compiler_as_with_it() -> None:
    text = """
{before}
for _ in range(3):
    update()
    optimizer.load_state_dict(optimizer.state_dict())
optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
print(json.dumps([loaded(), torch.is_grad_enabled(), [p.tolist() for p in model.parameters()]]))
"""
    without = run(text.replace("{before}", ""))
    with_it = run(text.replace("{before}", "import torch._dynamo"))
    assert (without[0], with_it[0]) == (False, True)
    assert without[1:] == with_it[1:]


@pytest.mark.soak
@pytest.mark.parametrize(
    "unknown",
    [
        "os.environ['PACELINE_PLAIN_TORCH'] = '1'",
        "torch_private.TESTED = ((9, 0), (9, 1))",
        "quick_start.STEP_DECORATOR = '_no_such_name'",
    ],
    ids=["switched off", "another version", "another name"],
)
def test_a_torch_that_is_not_known_is_left_as_it_is(unknown: str) -> None:
    text = """
import os, sys
from paceline import torch_private
from paceline.launch import quick_start
{unknown}
quick_start.load_compiler_late()
import json, torch
step = torch.optim.SGD.step.__code__.co_filename
functions = [getattr(method, "__wrapped__", None) for method in vars(torch.optim.Optimizer).values()]
told = any(hasattr(function, "__dynamo_disable") for function in functions)
torch.optim.SGD([torch.ones(2)])
print(json.dumps([step, told, "torch._dynamo" in sys.modules]))
"""
    step, told, loaded = run(text.replace("{unknown}", unknown), before="")
    assert step.endswith("optimizer.py")
    assert not told
    assert loaded


def test_from_the_first_compilation_on_the_methods_are_those_of_torch() -> None:
    text = """
update()
before = loaded()
compiled = torch.compile(lambda: optimizer.step(), backend="eager")
model(x).square().mean().backward()
compiled()
update()
told = getattr(torch.optim.Optimizer.zero_grad.__wrapped__, "__dynamo_disable").__module__
print(json.dumps([before, loaded(), told, torch.is_grad_enabled()]))
"""
    before, after, told, grad = run(text)
    assert not before
    assert after
    assert told.startswith("torch.")
    assert grad


@pytest.mark.parametrize("flags", ["--replicas 2", None], ids=["a replica", "the one process of verify"])
def test_what_we_start_starts_without_it(flags: str | None, start: Start) -> None:
    """And the garbage collector, which has rested while torch was loaded, works again and leaves torch alone."""
    script = """
import gc, json, sys
before = gc.isenabled()
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x[0]).square().mean())
for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=8):
    trainer.step(batch)
print(json.dumps({"compiler": "torch._dynamo" in sys.modules}))
print(json.dumps({"collects": [before, gc.isenabled()], "left alone": gc.get_freeze_count()}))
"""
    run = start(script, flags).fine()
    assert run.told("compiler") is False
    assert run.told("collects") == [True, True]
    assert run.told("left alone") > 100_000
