"""Hosts whose updates overlap with the next forward: the same bits as without, whatever looks at parameters when."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Start
from emulated import needs_hosts
from torch.overrides import BaseTorchFunctionMode

from paceline.mirrored.parameter_waits import LookedAtCalls
from paceline.torch_private import add_function_mode, function_modes, remove_function_mode

# Each case trains a model of its own; what the script sees of parameters between steps is told as well.
SCRIPT = """
import hashlib, json, os, sys, torch, torch.nn.functional as F, paceline as pl
from pathlib import Path
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.frozen(self.inner(self.table(tokens)))))

class Doubled(torch.autograd.Function):  # is handed a parameter without a call of torch
    @staticmethod
    def forward(context, weight):
        return 2 * weight
    @staticmethod
    def backward(context, gradient):
        return 2 * gradient

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(48, 300)
        self.norm = nn.BatchNorm1d(300)
        self.weight = nn.Parameter(torch.randn(300, 300) / 17)
        self.unused = nn.Linear(30, 30)
        self.norms = nn.ModuleList(nn.LayerNorm(300) for _ in range(3))
        self.back = nn.Linear(300, 3)

    def forward(self, x):
        x = self.norm(self.front(x)) @ Doubled.apply(self.weight)
        for norm in self.norms:
            x = norm(x)
        product = torch.vmap(lambda row: torch.dot(row, self.norms[0].bias))(x)
        return self.back(x) + product[:, None]

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(6, 40, num_layers=2, batch_first=True), nn.Linear(40, 3)
        self.attention = nn.MultiheadAttention(40, 4, batch_first=True)

    def forward(self, x):
        states, _ = self.inner(x.view(-1, 8, 6))
        self.attention.eval()  # no gradient, in a kernel of its own
        with torch.no_grad():
            looked, _ = self.attention(states, states, states, need_weights=False)
        self.attention.train()
        return self.head(states[:, -1] + looked[:, -1])

def penalized(model, batch):
    penalty = sum(weight.square().sum() for weight in model.parameters() if weight.requires_grad)
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * penalty

plain = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
generator = torch.Generator().manual_seed(1)
x = torch.randn(192, 48, generator=generator)
y = (x @ torch.randn(48, 3, generator=generator)).argmax(1)
tokens = torch.randint(50, (192, 9), generator=generator)
wide = lambda: nn.Sequential(*(layer for n in range(4) for layer in (nn.Linear(48 if not n else 256, 256), nn.Tanh())),
                             nn.Linear(256, 3))
large = lambda: nn.Sequential(nn.Linear(48, 1024), *(nn.Linear(1024, 1024) for _ in range(6)), nn.Linear(1024, 3))
scripted = lambda: nn.Sequential(nn.Linear(48, 64), torch.jit.script(nn.Linear(64, 64)), nn.Linear(64, 3))
as_tokens = lambda model, batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())
MODELS = {
    "wide": (wide, plain, (x, y)),
    "double": (lambda: wide().double(), plain, (x.double(), y)),
    "large": (large, plain, (x, y)),
    "tied": (Tied, as_tokens, (tokens,)),
    "odd": (Odd, penalized, (x, y)),
    "lstm": (Recurrent, plain, (x, y)),
    "script": (scripted, plain, (x, y)),
}

def bits(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]

def train(name, touch="", saved=None, resume=False):
    torch.manual_seed(0)
    make, loss, data = MODELS[name]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01) if name == "double" else 0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    trainer = pl.Trainer(model, optimizer, loss, scheduler=scheduler)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if touch else None
    seen, losses, waited = [], [], 0
    if resume:
        assert trainer.resume(saved)
    for epoch in range(2):
        for number, batch in enumerate(trainer.batches(data, 16, seed=5)):
            losses.append(trainer.step(batch))
            front, back = list(model.parameters())[0], list(model.parameters())[-1]
            if touch and number % 4 == 1:
                average.update_parameters(model)
            if touch and number % 4 == 2:
                seen.append(bits([front.clone(), back.data]))
            if touch == "touch" and number % 4 == 3:
                with torch.device("cpu"), torch.no_grad():
                    front.clamp_(-0.2, 0.2)
                    seen.append(float(back.detach().numpy().astype("float64").sum()))
        if saved and epoch == 0 and not resume:
            trainer.save(saved)
        seen.append(float(trainer.evaluate(data, loss, batch_size=32)))
        if epoch == 0:
            seen.append(bits([trainer.predict(data[0][:4])]))
    seen.append(bits(trainer.model.state_dict().values() if hasattr(trainer, "model") else model.state_dict().values()))
    if average is not None:
        seen.append(bits(average.state_dict().values()))
    return [losses if not resume else losses[-1:], seen if not resume else seen[-1:]]

found = {}
folder = Path(os.environ["SAVED"])
for case in sys.argv[1].split(","):
    name, _, how = case.partition("+")
    if how == "resume":
        whole = train(name, saved=folder / f"{name}.safetensors")
        again = train(name, saved=folder / f"{name}.safetensors", resume=True)
        assert again == [whole[0][-1:], whole[1][-1:]], (again, whole)
        found[case] = whole
    else:
        found[case] = train(name, touch=how)
print(json.dumps({"found": found}))
"""
CASES = "large,large+touch,wide+touch,double+touch,odd,odd+touch,tied+touch,lstm,script"


def both(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, cases: str) -> None:
    found = {}
    for flag in ("", "--overlap"):
        folder = tmp_path / f"saved{flag}"
        folder.mkdir()
        monkeypatch.setenv("SAVED", str(folder))
        run = start(SCRIPT, f"{flags} {flag}", cases).fine(170)
        found[flag] = run.told("found")
    for case, without in found[""].items():
        assert found["--overlap"][case] == without, case


def test_models_and_scripts_see_the_same_bits(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both(start, monkeypatch, tmp_path, "--exchange collective --replicas 2", CASES)


@pytest.mark.parametrize("wire", ["bf16", "int8", "topk:0.05", "powersgd:2"])
def test_wires_owe_the_same_also_after_a_resume(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wire: str
) -> None:
    both(start, monkeypatch, tmp_path, f"--exchange collective --replicas 3 --wire {wire}", "large,odd+resume")


@needs_hosts
def test_two_hosts_of_two_replicas_see_the_same_bits(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = "--replicas 4 --emulate hosts=2,link=1gbit"
    both(start, monkeypatch, tmp_path, flags, "large+look,odd+look,lstm,tied+resume")


def test_a_look_at_calls_is_beneath_the_users_own_modes_and_above_that_of_a_default_device() -> None:
    seen: list[str] = []
    waits: Any = SimpleNamespace(before_call=lambda function, given: seen.append(function.__name__))
    mine, users = LookedAtCalls(waits), BaseTorchFunctionMode()
    with torch.device("meta"):
        with users:
            add_function_mode(mine)
            assert function_modes()[0] is mine
            assert function_modes()[2] is users
        assert torch.ones(2).is_meta
    assert function_modes() == [mine]
    with torch.device("meta"):
        assert torch.ones(2).is_meta
    with users:
        remove_function_mode(mine)
        assert function_modes() == [users]
    assert function_modes() == []
    assert "ones" in seen
    torch.set_default_device("meta")
    add_function_mode(mine)
    torch.set_default_device(None)
    assert function_modes() == [mine]
    remove_function_mode(mine)
    assert function_modes() == []


WRITES = """
import json, os, sys, torch, torch.nn.functional as F, warnings, paceline as pl
from paceline.run_place import find_place
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
if "compiled" in sys.argv:
    model = torch.compile(model, backend="eager", fullgraph=True)
x, y = torch.randn(64, 8), torch.zeros(64, dtype=torch.long)
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
clip = 1.0 if "clip" in sys.argv else None
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, clip_norm=clip)
told = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number, batch in enumerate(trainer.batches((x, y), 8, epochs=1000 if "kill" in sys.argv else 1)):
        if "kill" in sys.argv and number == 20 and find_place().rank == 1:
            os.kill(os.getpid(), 9)
        trainer.step(batch)
        if "write" in sys.argv and number == 3:
            with torch.no_grad():
                list(model.parameters())[0].mul_(0.5)
        if "leave" in sys.argv and number == 2:
            break
told = ["has written to parameter" in str(warning.message) for warning in caught]
print(json.dumps({"warned": any(told)}))
print(json.dumps({"modes": len(torch.overrides._get_current_function_mode_stack())}))
if "leave" not in sys.argv:
    print(json.dumps({"bits": [float(p.double().sum()) for p in model.parameters()]}))
"""
TWO = "--exchange collective --replicas 2 --overlap"


@needs_hosts
def test_who_writes_to_a_shared_parameter_between_steps_is_told_and_nobody_else(start: Start) -> None:
    flags = "--replicas 4 --emulate hosts=2,link=1gbit --overlap"
    assert start(WRITES, flags, "write").fine(110).told("warned")
    assert not start(WRITES, flags).fine(110).told("warned")


# One replica of each host is late in adding up what all have written of a step; the others may be in the next by then.
LATE = """
import json, sys, time, torch, torch.nn.functional as F, paceline as pl
from paceline.mirrored import engine
from paceline.run_place import find_place
from torch import nn

if find_place().rank % 2 and "late" in sys.argv:
    add_up = engine.MirroredEngine._add_up
    def late(self, members, number):
        time.sleep(0.05)
        return add_up(self, members, number)
    engine.MirroredEngine._add_up = late
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
x, y = torch.randn(64, 8), torch.arange(64) % 3
def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), torch.tensor(len(batch[1]) + 1.0)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
losses = [trainer.step(batch) for batch in trainer.batches((x, y), 8, seed=5)]
trainer.evaluate((x, y), lambda model, batch: model(batch[0]).sum())
print(json.dumps({"losses": losses, "bits": [float(p.double().sum()) for p in model.parameters()]}))
"""


@needs_hosts
def test_who_is_late_in_adding_up_a_step_adds_up_that_step(start: Start) -> None:
    flags = "--replicas 4 --emulate hosts=2,link=1gbit --overlap"
    late, quick = (start(LATE, flags, how).fine(110) for how in ("late", ""))
    for replica in range(4):
        assert late.told("losses", replica) == quick.told("losses", 0)
        assert late.told("bits", replica) == quick.told("bits", 0)


def test_a_run_ends_though_its_script_leaves_the_loop_before_a_step_is_complete(start: Start) -> None:
    run = start(WRITES, TWO, "leave").fine(60)
    assert run.seconds < 40


def test_a_compiled_model_has_its_parameters_before_it_is_called(start: Start) -> None:
    compiled, plain = (start(WRITES, TWO, how).fine(110) for how in ("compiled", ""))
    assert compiled.told("bits") == plain.told("bits")
    assert plain.told("modes") == 0


@pytest.mark.parametrize("flags", [TWO, "--replicas 4 --emulate hosts=2,link=1gbit --overlap"])
def test_a_run_ends_with_a_sentence_when_a_replica_is_killed(start: Start, flags: str) -> None:
    if "--emulate" in flags and os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    run = start(WRITES, flags, "kill").end(110)
    assert run.code != 0
    assert "replica 1 was killed by SIGKILL" in run.err
    assert "Traceback" not in run.err.split("replica 1 was killed")[0]
    assert run.seconds < 60


def test_the_length_of_a_gradient_is_not_known_in_time(start: Start) -> None:
    run = start(WRITES, TWO, "clip").end(60)
    assert run.code != 0
    assert "overlap is 'set'" in run.err
    assert "leave it out, or clip_norm" in run.err


REFUSED = [
    ("--replicas 2", "it is for several hosts"),
    ("--replicas 2 --servers 1", "with servers replicas push at each step"),
    ("--replicas 2 --join 127.0.0.1:1 --token x", "with servers replicas push at each step"),
    ("--replicas 2 --servers 1 --only sparse", "tables on servers"),
    ("--replicas 2 --in-graph", "with servers replicas push at each step"),
    ("--replicas 4 --stages 2 --emulate hosts=2,link=1gbit", "cut model"),
    ("--replicas 4 --emulate hosts=2,link=1gbit --every 8", "give only one of them"),
    ("--replicas 4 --emulate hosts=2,link=1gbit --gossip", "give only one of them"),
    ("--replicas 6 --emulate hosts=2:3,link=1gbit", "no host can join a run with --overlap"),
    ("--replicas 4 --emulate hosts=2,link=1gbit --on-failure continue", "no death is survived with --overlap"),
    ("--replicas 4 --emulate hosts=2,link=1gbit --on-failure restart", "no death is survived with --overlap"),
    ("--replicas 4 --emulate hosts=2,link=1gbit --operation-timeout 5", "cannot be given up halfway"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSED)
def test_what_it_cannot_be_together_with_is_refused_before_anything_starts(start: Start, flags: str, why: str) -> None:
    run = start(WRITES, f"{flags} --overlap").end(30)
    assert run.code == 2
    assert why in run.err
    assert len(run.err.strip().splitlines()) == 1
