"""`pl.distribute`: an existing loop gets the mean gradient, as with DDP, and what else it does means what it did."""

import json
import signal
import sys
from pathlib import Path

import pytest
from conftest import MAIN, Run, Start

from paceline.exchange.board import Board
from paceline.exchange.words import Word
from paceline.watch.display import Meter

# Every case trains the same small model on the same samples with and without replicas: each replica takes its part of
# the batch, and in one process the whole batch is taken at once. In float64, so that rounding hides nothing.
LOOPS = """
import copy, io, json
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
import paceline as pl

torch.set_default_dtype(torch.float64)
me = pl.place()
x = torch.randn(96, 12, generator=torch.Generator().manual_seed(1))
y = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(2, 2)
        self.two.bias.requires_grad_(False)
    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))

def part(step, count=4):
    first = (step % count) * 24
    size = 24 // me.world
    mine = slice(first + me.rank * size, first + (me.rank + 1) * size)
    return x[mine], y[mine]

def make(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = Net()
    return model, kind(model.parameters(), lr=0.05, **options)

def backward(model, step):
    xs, ys = part(step)
    F.cross_entropy(model(xs), ys).backward()

def tell(case, model, **more):
    values = [t.detach().double() for t in [*model.parameters(), *model.buffers()]]
    told = [float(f(v)) for v in values for f in (torch.sum, torch.linalg.vector_norm)]
    print(json.dumps({case: [*told, *more.values()]}))

def train(model, optimizer, steps, after=lambda step: None):
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        after(step)

def gradients():
    model, optimizer = pl.distribute(*make())
    backward(model, 0)
    sums = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    print(json.dumps({"gradient": [*sums, *(p.grad is None for p in model.parameters())]}))
    assert model.unused.weight.grad is None, "a parameter nobody used has a gradient"

def clipped():
    model, optimizer = pl.distribute(*make())
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    tell("clipped", model)

def accumulated():
    for name, silent in (("accumulated", False), ("accumulated silently", True)):
        model, optimizer = pl.distribute(*make(torch.optim.SGD, momentum=0.9))
        for step in range(0, 8, 2):
            optimizer.zero_grad()
            if silent:
                with model.no_sync():
                    backward(model, step)
            else:
                backward(model, step)
            backward(model, step + 1)
            optimizer.step()
        tell(name, model)

def scheduled():
    model, optimizer = make()
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = pl.distribute(model, optimizer)
    after = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        before.step()
        after.step()
    tell("scheduled", model, lr=round(optimizer.param_groups[0]["lr"], 8))

def resumed():
    model, optimizer = pl.distribute(*make())
    train(model, optimizer, range(3))
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    state = saved[1]["state"]
    assert all(float(s["step"]) == 3 for s in state.values()) and len(state) == 3, state
    model, optimizer = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model, optimizer = pl.distribute(model, optimizer)
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
    tell("resumed", model)

def closure():
    model, optimizer = pl.distribute(*make())
    for step in range(3):
        def again():
            optimizer.zero_grad()
            backward(model, step)
            return step
        assert optimizer.step(again) == step
    tell("closure", model)

def unfrozen():
    model, optimizer = pl.distribute(*make())
    train(model, optimizer, range(4), lambda step: model.two.bias.requires_grad_(step >= 1))
    tell("unfrozen", model)

def written_in_place():
    def clamp(step):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
    def reinitialise(step):
        if step == 2:
            nn.init.constant_(model.one.weight, 0.01)
            model.two.reset_parameters()
    def scale(step):
        for p in model.parameters():
            p.data.mul_(0.9)
    def load(step):
        if step == 2:
            model.load_state_dict(before)
    for name, after in (("clamped", clamp), ("reinitialised", reinitialise), ("scaled", scale), ("loaded", load)):
        model, optimizer = pl.distribute(*make(torch.optim.SGD, momentum=0.9))
        before = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(5), after)
        tell(name, model)

def averaged():
    model, optimizer = pl.distribute(*make())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    train(model, optimizer, range(5), lambda step: average.update_parameters(model))
    tell("averaged", average)

def copied():
    model, optimizer = pl.distribute(*make())
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save([model, optimizer.state_dict()], file)
    assert file.tell() < 40_000, "more than the model was saved"
    file.seek(0)
    read, state = torch.load(file, weights_only=False)
    for twin in (copy.deepcopy(model), read):
        own = torch.optim.SGD(twin.parameters(), lr=0.1 * (me.rank + 1))
        with twin.no_sync():
            backward(twin, 0)
        backward(twin, 1)  # which must neither wait for others nor reach the model
        own.step()
    tell("copied", model)
    continued = make()[1].__class__(read.parameters(), lr=0.05)
    continued.load_state_dict(state)

def reparametrized():
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.back = nn.Linear(16, 16)
            self.again = nn.Linear(16, 16)
            self.again.weight = self.back.weight
            parametrizations.spectral_norm(self.one)
            parametrizations.weight_norm(self.two)
            prune.l1_unstructured(self.back, "bias", amount=0.5)
        def forward(self, x):
            return self.two(torch.tanh(self.again(self.back(self.one(x)))))
    torch.manual_seed(0)
    model = Tied()
    model, optimizer = pl.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    def prune_more(step):
        if step == 2:
            prune.l1_unstructured(model.again, "bias", amount=0.5)
    train(model, optimizer, range(5), prune_more)
    tell("reparametrized", model)

def replaced_buffers():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
        def forward(self, x):
            scale = 1 + 0.1 * self.seen
            self.seen = self.seen + 1 + 10 * me.rank  # the first replica's counts
            return super().forward(x) * scale
    torch.manual_seed(0)
    model = Counting()
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    train(model, optimizer, range(5))
    tell("replaced buffers", model)

class Lookahead(torch.optim.Optimizer):
    # Keeps a parameter of its own, looks at all parameters at once, and has a hook and two optimizers inside.
    def __init__(self, params, inner):
        super().__init__(params, {"lr": 0.5})
        self.inner, self.slow, self.count = inner, None, 0
    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.slow = self.slow or [p.clone() for p in params]
        scale = 1 / (1 + torch.stack([p.grad.norm() for p in params]).norm())
        for p in params:
            p.grad.mul_(scale)
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(params, self.slow):
                slow.lerp_(p, 0.5)
                p.copy_(slow)

def other_optimizers():
    model, inner = make(torch.optim.RAdam)
    model, optimizer = pl.distribute(model, Lookahead(list(model.parameters()), inner))
    train(model, optimizer, range(6))
    tell("wrapped", model)
    model, _ = make()
    model.two.bias.requires_grad_(True)
    one = torch.optim.SGD(model.one.parameters(), lr=0.05)
    two = torch.optim.AdamW(model.two.parameters(), lr=0.05)
    hooked = []
    two.register_step_post_hook(lambda *_: hooked.append(len(two.state)))
    pl.distribute(model, one), pl.distribute(model, two)
    for step in range(4):
        one.zero_grad(); two.zero_grad(); backward(model, step); one.step(); two.step()
        if step == 1:
            one.add_param_group({"params": model.unused.parameters(), "lr": 0.1})
    tell("two optimizers", model, hooked=hooked[-1])
    model, _ = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = pl.distribute(model, torch.optim.LBFGS(trained, lr=0.1))
    def closure():
        optimizer.zero_grad()
        xs, ys = part(0)
        loss = F.cross_entropy(model(xs), ys)
        loss.backward()
        return 1.0  # of a loss it would look at the change, which is each replica's own
    for step in range(2):
        optimizer.step(closure)
    tell("lbfgs", model)

def late():
    model, optimizer = make(torch.optim.SGD)
    first = torch.optim.SGD(model.one.parameters(), lr=0.1)
    model.two.requires_grad_(False)
    model, first = pl.distribute(model, first)
    model.two.requires_grad_(True)
    first.add_param_group({"params": model.two.parameters()})
    backward(model, 0)
    try:
        first.step()
        refused = None
    except pl.PacelineError as error:
        refused = str(error)
    print(json.dumps({"late": refused}))

def together():
    pl.barrier()
    print(json.dumps({"together": [pl.mean(1.5), len(pl.gather("é")) / me.world, pl.broadcast(me.rank)]}))

for case in (gradients, clipped, accumulated, scheduled, resumed, closure, unfrozen, written_in_place, averaged, copied,
             reparametrized, replaced_buffers, other_optimizers, together, late):
    case()
"""

DEATH = """
import json, os, signal
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Linear(6, 2)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
me = pl.place().rank
for step in range(20):
    optimizer.zero_grad()
    loss = (model(torch.ones(2, 6)) * (me + 1)).sum()
    if step == 9 and me == 1:
        model.weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    if step in (8, 9):
        print(json.dumps({f"gradient {step}": model.weight.grad[0, 0].item()}))
    optimizer.step()
print(json.dumps({"end": model.weight.sum().item()}))
"""


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(LOOPS, None).fine()


@pytest.fixture(scope="module")
def three(start: Start) -> Run:
    return start(LOOPS, "--replicas 3").fine()


def assert_numbers_of(alone: Run, replicas: list[list[dict[str, list[float]]]]) -> None:
    """`replicas`: what each of them said."""
    expected = {case: numbers for line in alone.said(0) for case, numbers in line.items() if case != "late"}
    assert len(expected) == 20
    for said in replicas:
        found = {case: numbers for line in said for case, numbers in line.items()}
        for case, numbers in expected.items():
            assert found[case] == pytest.approx(numbers, rel=1e-9, abs=1e-9), case
        assert said == replicas[0], "replicas differ"


def test_loops_of_all_kinds_give_the_numbers_of_one_process(alone: Run, three: Run) -> None:
    assert_numbers_of(alone, [three.said(replica) for replica in range(3)])


@pytest.mark.soak
def test_they_do_so_under_torchrun(alone: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = Run(tmp_path, *torchrun, "--redirects", "3", "--log-dir", str(tmp_path / "run"), "train.py").fine()
    logs = sorted((tmp_path / "run").rglob("stdout.log"))
    said = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert len(said) == 2, run.err
    assert_numbers_of(alone, said)


def test_a_gradient_that_is_no_mean_is_refused_before_it_is_used(alone: Run, three: Run) -> None:
    assert alone.told("late") is None
    for replica in range(3):
        assert "a parameter of shape (3, 16) was frozen and in no optimizer" in three.told("late", replica)


@pytest.fixture(scope="module")
def death(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(DEATH)
    return Run(folder, sys.executable, "-c", MAIN, "run", "train.py", "--run-folder", "run", "--replicas", "3").fine()


def test_when_one_dies_the_others_go_on_with_the_mean_of_those_who_are_left(death: Run) -> None:
    run = death
    assert f"replica 1 was killed by {signal.SIGKILL.name} at step 9" in run.err
    for replica in (0, 2):
        assert run.told("gradient 8", replica) == 2 * (1 + 2 + 3) / 3
        assert run.told("gradient 9", replica) == 2 * (1 + 3) / 2
    assert run.told("end", 0) == run.told("end", 2)


def test_loss_and_samples_that_nobody_knows_are_not_shown_as_zero(death: Run) -> None:
    assert "20 steps in" in death.err
    assert "samples/s" not in death.err
    assert "loss" not in death.err
    assert death.events[-1]["loss"] is None
    board, meter = Board.create(1, supervised=False), Meter()
    for step in (0, 1, 40):
        board.set(0, Word.STEP, step)
        progress = meter.read(board, [0])
    assert str(progress).startswith("step 40  ")
    assert str(progress).endswith(" steps/s")


def test_replicas_whose_parameters_become_different_are_told_so(start: Start) -> None:
    script = """
import torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if step == 3 and pl.place().rank == 0:
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
print("done")
"""
    run = start(script, "--replicas 2").end()
    assert run.code
    assert "have become different; change them in every replica alike" in run.err
    assert "done" not in run.out
