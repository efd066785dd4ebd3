"""A device of a cut model is killed: nobody can go on without it, so all start anew, from what was saved last."""

from __future__ import annotations

import signal

import pytest
import torch
from conftest import Run, Start
from safetensors.torch import load_file

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import paceline as pl
from paceline.run_place import find_place

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01),
                     lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
trainer.resume("model.safetensors")
losses = {}
for batch in trainer.batches((x, y), batch_size=8, epochs=3):
    losses[trainer.steps] = trainer.step(batch)
    if trainer.steps % 2 == 0:
        trainer.save("model.safetensors")
    if sys.argv[1:] == [str(trainer.steps)] and find_place().rank == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
trainer.save("end.safetensors")
print(json.dumps({"losses": losses}))
"""


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None).fine()


@pytest.mark.parametrize(
    "flags",
    [
        "--stages 2 --micro-batches 2",
        pytest.param("--mesh data=2,model=2 --layout batch=data,hidden=model", marks=pytest.mark.soak),
        pytest.param("--mesh model=2 --layout hidden=model --replicas 2 --servers 1", marks=pytest.mark.soak),
    ],
)
def test_all_start_anew_and_the_end_is_that_of_one_process(start: Start, alone: Run, flags: str) -> None:
    run = start(SCRIPT, f"{flags} --on-failure restart", "5").fine()
    assert "was killed by SIGKILL at step 5; a cut model needs all its devices, all start anew" in run.err
    expected = alone.told("losses")
    losses = run.told("losses")
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-4)
    one, other = (load_file(each.folder / "end.safetensors") for each in (alone, run))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)
    run.assert_nothing_left()


def test_by_default_a_death_ends_the_run_and_is_explained(start: Start) -> None:
    run = start(SCRIPT, "--stages 2 --micro-batches 2", "5").end()
    assert run.code == 128 + signal.SIGKILL
    assert run.err == "paceline: device 1 of replica 0 was killed by SIGKILL at step 5; the run ends\n"
    run.assert_nothing_left()
