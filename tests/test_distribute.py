"""`pl.distribute`: an existing loop gets the mean gradient, as with DDP, and one set of parameters."""

import signal

from conftest import Start

# Every case trains the same small model on the same samples with and without replicas: each replica takes its part of
# the batch, and in one process the whole batch is taken at once.
LOOPS = """
import json, os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

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
    weights = [round(float(p.detach().double().sum()), 5) for p in model.parameters()]
    print(json.dumps({case: [*weights, *more.values()]}))

def gradients():
    model, optimizer = pl.distribute(*make())
    backward(model, 0)
    print(json.dumps({"gradient": [None if p.grad is None else round(float(p.grad.double().sum()), 5)
                                   for p in model.parameters()]}))
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
    for step in range(3):
        optimizer.zero_grad(); backward(model, step); optimizer.step()
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    state = saved[1]["state"]
    assert all(float(s["step"]) == 3 for s in state.values()) and len(state) == 3, state
    model, optimizer = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    model, optimizer = pl.distribute(model, optimizer)
    optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        optimizer.zero_grad(); backward(model, step); optimizer.step()
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
    for step in range(4):
        if step == 2:
            model.two.bias.requires_grad_(True)
        optimizer.zero_grad(); backward(model, step); optimizer.step()
    tell("unfrozen", model)

for case in (gradients, clipped, accumulated, scheduled, resumed, closure, unfrozen):
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


def test_loops_of_all_kinds_give_the_numbers_of_one_process(start: Start) -> None:
    alone = start(LOOPS, None).fine()
    three = start(LOOPS, "--replicas 3").fine()
    cases = [key for line in alone.said(0) for key in line]
    assert len(cases) == 8
    for replica in range(3):
        for case in cases:
            got, expected = three.told(case, replica), alone.told(case)
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                assert a == b or abs(a - b) < 2e-4, f"{case}: {got} instead of {expected}"
        assert [three.told(case, replica) for case in cases] == [three.told(case) for case in cases], "replicas differ"


def test_when_one_dies_the_others_go_on_with_the_mean_of_those_who_are_left(start: Start) -> None:
    run = start(DEATH, "--replicas 3").fine()
    assert f"replica 1 was killed by {signal.SIGKILL.name} at step 9" in run.err
    for replica in (0, 2):
        assert run.told("gradient 8", replica) == 2 * (1 + 2 + 3) / 3
        assert run.told("gradient 9", replica) == 2 * (1 + 3) / 2
    assert run.told("end", 0) == run.told("end", 2)
