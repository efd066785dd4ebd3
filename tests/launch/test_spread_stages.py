"""One replica whose stages are on several hosts: what hosts keep to themselves, bring together, and tell each other.

That it comes to the result of one process is in the contract ("4 stages on 2 hosts") and in the matrix of resumes.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from conftest import Start
from emulated import CUT_OFF_FROM_HOST_0, END_S, needs_hosts
from safetensors.torch import load_file

pytestmark = [needs_hosts, pytest.mark.timeout(200)]

SCRIPT = """
import json, os, signal, subprocess, sys
import torch
from torch import nn
from torch.nn import functional as F
import paceline as pl
from paceline.run_place import find_place

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.BatchNorm1d(9), nn.Linear(9, 6), nn.Tanh())
        self.unembed = nn.Linear(6, 12, bias=False)
        self.unembed.weight = self.embed.weight  # on the first host and on the last

    def features(self, x):
        return self.layers(self.embed(x))

    def forward(self, x):
        return self.unembed(self.features(x))

def loss(model, batch):
    found = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return found, len(batch[0])  # (sum, count)

model = Model()
x = torch.arange(48) % 12
data = (x, (x * 5 + 1) % 12)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
trainer = pl.Trainer(model, optimizer, loss, clip_norm=0.3)
who, what = int(sys.argv[1]), sys.argv[2]
told = []
for batch in trainer.batches(data, batch_size=12, epochs=3, seed=3):
    if trainer.steps == 4 and find_place().rank == who:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise ValueError("of the script")
        if what == "evaluate":
            trainer.evaluate(data, loss)
        if what == "call":
            model(x[:2])
        if what == "state":
            model.state_dict()
        if what == "method":
            model.features(x[:2])
        if what == "silence":
            subprocess.run(["ip", "link", "set", "dev", "eth0", "down"], check=True)
    trainer.step(batch)
    if what == "often" and trainer.steps in (2, 4):
        alone = find_place().world == 1 or find_place().rank == trainer.steps // 4
        told.append(trainer.predict(x[:5]).flatten().tolist() if alone else None)
    if what == "often" and trainer.steps % 3 == 0:
        told.append(trainer.evaluate(data, loss))
        told.append(float(trainer.predict(x[:5]).sum()))
        told.append(float(model.eval()(x[:5]).sum()))
        model.train()
        told.append({name: float(value.double().sum()) for name, value in model.state_dict().items()})
told.append(float(trainer.predict(x[:5]).sum()))
told.append(float(trainer.predictor()(x[:5]).sum()))
trainer.save("end.safetensors")
print(json.dumps({"told": told}))
"""
ODD = """
import copy, json
import torch
from torch import nn
from torch.nn import functional as F
import paceline as pl
from paceline.run_place import find_place

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.into = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.unembed, self.other = nn.Linear(6, 12, bias=False), nn.Linear(6, 12)
        self.unembed.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))  # of stages on both hosts
        self.register_buffer("louder", torch.full((6,), 2.0))  # not used in training

    def forward(self, x, short):
        x = F.one_hot(x, 12)[:, :6].to(torch.float64) if short else self.embed(x)
        x = self.layers(self.into(x) * self.scale) * self.scale
        if not self.training:
            x = x * self.louder
        return self.other(x) if short else self.unembed(x)

def loss(model, batch):
    short = len(batch[0]) == 7  # then there is no use for the tied weight
    return F.cross_entropy(model(batch[0], short), batch[1])

model = Model()
x = torch.arange(19) % 12
data = (x, (x * 5 + 1) % 12)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), loss, clip_norm=0.05)
copied = copy.deepcopy(model)
told = []
for batch in trainer.batches(data, batch_size=12, epochs=3, seed=1):
    told.append(trainer.step(batch))
    told.append(float(trainer.predict(x[:5], False).sum()))  # all ask at once
    model.scale.mul_(1.01)  # what a script does to a buffer in all processes
told.append(trainer.evaluate(data, loss))
told.append(float(copied(x[:3], False).sum()))
print(json.dumps({"told": told}))
"""
OTHER_TENSORS = """
import torch
from torch import nn
from torch.nn import functional as F
import paceline as pl

torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        first, second = (self.b, self.a) if len(x) == 7 else (self.a, self.b)
        return second(torch.tanh(first(x)))

model, x = Model(), torch.randn(19, 6)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5),
                     lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
for batch in trainer.batches((x, torch.arange(19) % 6), batch_size=12, epochs=1):
    trainer.step(batch)
"""
ON_TWO_HOSTS = "--stages 2 --micro-batches 1 --replicas 1 --emulate hosts=2,link=1gbit --quiet"


def test_what_the_model_answers_after_each_evaluation_is_what_one_process_has(start: Start) -> None:
    """Tied weights on both hosts, statistics that change on one, a norm over all; every process tells."""
    alone = start(SCRIPT, None, "-1 often").fine()
    spread = start(SCRIPT, ON_TWO_HOSTS, "-1 often").fine(END_S)
    for rank in (0, 1):
        for found, wanted in zip(spread.told("told", rank), alone.told("told"), strict=True):
            if found is not None:
                assert found == pytest.approx(wanted, rel=1e-9)
    asked = [[told is not None for told in spread.told("told", rank)[:6:5]] for rank in (0, 1)]
    assert asked == [[True, False], [False, True]]
    for name in ("end.safetensors", "*.training.safetensors"):
        (one,), (other,) = (list(Path(run.folder).glob(name)) for run in (alone, spread))
        tensors, others = load_file(one), load_file(other)
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(others[key], tensor, rtol=1e-9, atol=1e-12)
    spread.assert_nothing_left()


@pytest.mark.parametrize("what", ["call", "state", "method"])
def test_old_values_are_not_used_in_silence(what: str, start: Start) -> None:
    run = start(SCRIPT, ON_TWO_HOSTS, f"0 {what}").end(END_S)
    assert run.code == 1
    assert "model is 'used between two steps': stages are on 2 hosts, and this one has old values" in run.err
    assert "Traceback" not in run.err


def test_what_is_used_in_some_steps_or_some_calls_only_is_right(start: Start) -> None:
    """Four stages, so that the first device of the second host is not the one that has the tied weight."""
    alone = start(ODD, None).fine()
    spread = start(ODD, ON_TWO_HOSTS.replace("--stages 2", "--stages 4")).fine(END_S)
    for rank in range(4):
        assert spread.told("told", rank) == pytest.approx(alone.told("told"), rel=1e-9)


def test_a_graph_that_needs_a_weight_on_another_host_is_refused(start: Start) -> None:
    run = start(OTHER_TENSORS, ON_TWO_HOSTS).end(END_S)
    assert run.code == 1
    assert "model is 'Model': called like this it would need a.weight on another host than at first" in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize("who", [0, 1])
def test_a_device_that_is_killed_ends_the_run_on_all_hosts(who: int, start: Start) -> None:
    run = start(SCRIPT, ON_TWO_HOSTS, f"{who} kill").end(END_S)
    assert run.code == 128 + signal.SIGKILL
    killed = f"device {who} of replica 0 was killed by SIGKILL at step 4"
    assert f"paceline: {killed}; the run ends" in run.err
    assert f"paceline: host {who} ended the run: {killed}" in run.err
    assert "Traceback" not in run.err
    run.assert_nothing_left()


def test_one_device_that_makes_another_call_is_told_of(start: Start) -> None:
    run = start(SCRIPT, ON_TWO_HOSTS, "1 evaluate").end(30)
    assert run.code == 1
    assert "evaluates, saves or ends its batches" in run.err
    assert "every replica must make the same trainer calls in the same order" in run.err
    run.assert_nothing_left()


def test_an_error_of_the_script_on_one_host_is_told_and_ends_the_others(start: Start) -> None:
    run = start(SCRIPT, ON_TWO_HOSTS, "1 raise").end(END_S)
    assert run.code == 1
    assert "ValueError: of the script" in run.err
    run.assert_nothing_left()


@pytest.mark.soak
def test_a_link_that_falls_silent_ends_both_hosts(start: Start) -> None:
    run = start(SCRIPT, f"{ON_TWO_HOSTS} --lost-after 3s", "1 silence").end(END_S)
    assert run.code != 0
    assert "host 1 is gone (it has been silent for 3 s); the run ends" in run.err
    assert re.search(CUT_OFF_FROM_HOST_0, run.err), run.err
    run.assert_nothing_left()


@pytest.mark.soak
def test_three_hosts_of_two_stages(start: Start) -> None:
    alone = start(SCRIPT, None, "-1 none").fine()
    spread = start(SCRIPT, ON_TWO_HOSTS.replace("hosts=2", "hosts=3").replace("--stages 2", "--stages 6"), "-1 none")
    assert spread.fine(END_S).told("told", 5) == pytest.approx(alone.told("told"), rel=1e-9)
