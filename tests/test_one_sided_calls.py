"""What one process calls alone that all have to call is told at once, by what the others do and not by a clock."""

from __future__ import annotations

import re

import pytest
from conftest import Start

SCRIPT = """
import json, sys, time, torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
call, caller, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
calls = {
    "evaluate": lambda: trainer.evaluate(x, lambda model, x: model(x).mean()),
    "predictor": lambda: trainer.predictor()(x[:2]),
    "save": lambda: trainer.save("model.safetensors"),
    "all": lambda: None,
}
mine = pl.place().rank == caller
began = None
try:
    for number, batch in enumerate(trainer.batches(x, 8, epochs=2)):
        if number == 5:
            if mine:
                time.sleep(pause_s)
            began = time.monotonic()
            if mine:
                calls[call]()
        trainer.step(batch)
        if call == "all" and number in (2, 5):
            trainer.predictor()(x[:2])
            trainer.evaluate(x, lambda model, x: model(x).mean())
except pl.PacelineError:
    print(json.dumps({"told after": time.monotonic() - began}))
    raise
print(json.dumps({"done": trainer.steps}))
"""
EVERY_REPLICA = ": every replica must make the same trainer calls in the same order"
EVERY_DEVICE = ": all devices of a replica must ask it together; trainer.predict answers one alone"
# What is typed, who calls what alone, and what is said of it; or the same the other way round.
ALONE = {
    "stages": ("--stages 2", "predictor 0", "device 0 of replica 0 asks a predictor", "device 1 of replica 0"),
    "layout": (
        "--mesh model=2 --layout hidden=model",
        "predictor 1",
        "device 1 of replica 0 asks a predictor",
        "device 0 of replica 0",
    ),
    "mirrored": ("--replicas 2", "evaluate 0", "replica 0 evaluates", "replica 1"),
    "hosts": ("--replicas 2 --exchange collective", "evaluate 0", "replica 0 evaluates", "replica 1"),
    "hosts, saving": ("--replicas 2 --exchange collective", "save 1", "replica 1 saves or resumes", "replica 0"),
}


def seconds_until_told(start: Start, way: str) -> float:
    """Returns how long it took until the first of the two was told, from when both were about to make their call."""
    flags, call, does, other = ALONE[way]
    run = start(SCRIPT, f"{flags} --timeout 60", f"{call} 0").end()
    assert run.code == 1
    other_does = f"{other} takes a step"
    why = EVERY_DEVICE if "predictor" in call else EVERY_REPLICA
    assert run.sentence in (f"{does} while {other_does}{why}", f"{other_does} while {does}{why}")
    told = [seconds for process in (0, 1) for seconds in run.all_told("told after", process)]
    assert told
    return min(told)


@pytest.mark.parametrize("way", ALONE)
def test_a_call_of_one_process_alone_is_told_long_before_the_time_limit(start: Start, way: str) -> None:
    assert seconds_until_told(start, way) < 10.0  # of a machine that may have other things to do


@pytest.mark.soak
@pytest.mark.parametrize("way", ALONE)
def test_a_call_of_one_process_alone_is_told_within_a_second(start: Start, way: str) -> None:
    assert seconds_until_told(start, way) < 1.0


@pytest.mark.parametrize(
    "flags", [pytest.param("--stages 2", marks=pytest.mark.soak), "--replicas 2 --exchange collective"]
)
def test_one_that_is_slow_is_waited_for(start: Start, flags: str) -> None:
    run = start(SCRIPT, f"{flags} --timeout 60", "all 1 2.5").fine()
    assert [run.told("done", process) for process in (0, 1)] == [16, 16]


TWO_TRAINERS = """
import torch, paceline as pl

def trainer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())

one, other = trainer(), trainer()
x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
for _ in range(2):
    for batches in zip(one.batches(x, 2), other.batches(x[:9], 2)):  # the last is too small for both replicas
        one.step(batches[0])
        other.step(batches[1])
"""


def test_replicas_that_wait_for_each_other_in_two_trainers_on_servers_are_told(start: Start) -> None:
    run = start(TWO_TRAINERS, "--replicas 2 --servers 1 --timeout 60").end()
    assert run.code == 1
    assert re.fullmatch(
        r"replica (0|1) waits for work of one trainer, of which replica (0|1) has the last samples, and replica \2 "
        r"waits for replica \1's part of another: with several trainers on servers give drop_last=True, or batch sizes "
        "that leave samples for every replica in each batch",
        run.sentence,
    )
