"""torch's compiler is loaded by those who use it, and then nothing is different from plain torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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


def run(text: str) -> Any:
    ended = subprocess.run([sys.executable, "-c", START + text], capture_output=True, text=True, timeout=100)
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


def test_a_replica_starts_without_it(start: Start) -> None:
    script = """
import json, sys
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x[0]).square().mean())
for batch in trainer.batches(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=8):
    trainer.step(batch)
print(json.dumps({"compiler": "torch._dynamo" in sys.modules}))
"""
    run = start(script, "--replicas 2").fine()
    assert run.told("compiler") is False
