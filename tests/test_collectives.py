"""`pl.barrier`, `pl.mean`, `pl.gather`, `pl.broadcast`: every replica gets the same, wherever the replicas are."""

import math
import os
from typing import Any

import pytest
import torch
from conftest import Start
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline import collectives
from paceline.errors import InvalidInput

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]

# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randint(0, 100, shape, generator=seed).to(dtype)
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN | tensors(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


@given(VALUES)
def test_in_one_process_every_value_comes_back_as_it_is(value: Any) -> None:
    assert same([value], pl.gather(value))
    assert same(value, pl.broadcast(value))


@given(st.lists(tensors(), min_size=1, max_size=1), st.integers(1, 5))
def test_a_mean_is_that_of_all_and_keeps_the_type(made: list[torch.Tensor], count: int) -> None:
    (tensor,) = made
    values = [tensor + number if tensor.dtype != torch.bool else tensor for number in range(count)]
    found = collectives._mean(values, tensor, "value")
    exact = torch.stack([value.to(torch.complex128) for value in values]).mean(0)
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    assert found.dtype == (torch.float32 if whole else tensor.dtype)
    assert found.shape == tensor.shape
    assert torch.allclose(found.to(torch.complex128), exact, rtol=0.01)


def test_what_cannot_be_exchanged_is_refused_in_one_process_too() -> None:
    for value in (object(), {1: 2}, {"a": {1, 2}}, b"bytes", 2**64, torch.eye(2).to_sparse()):
        with pytest.raises(InvalidInput, match=r"^value is "):
            pl.gather(value)
    for value in ("text", [1.0], None):
        with pytest.raises(InvalidInput, match="there is no mean of it"):
            pl.mean(value)
    for other in (torch.zeros(3, 1), torch.zeros(3).double(), 1.0, {"a": 1.0}):
        with pytest.raises(InvalidInput, match="replica 1 has that and the first a float32 tensor of shape"):
            collectives._mean([torch.zeros(3), other], torch.zeros(3), "value")
    assert math.isclose(pl.mean(3), 3.0)


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────

CALLS = """
import json, sys, time, torch, paceline as pl
from torch import nn
me = pl.place()
pl.barrier()
told = {}
told["mean"] = pl.mean(me.replica)
told["dict"] = pl.mean({"loss": torch.full((2,), float(me.replica)), "right": me.replica == 0})
told["dict"]["loss"] = told["dict"]["loss"].tolist()
large = torch.arange(3_000_000, dtype=torch.float64) * (me.replica + 1)
told["large"] = float(pl.mean(large)[-1])
told["gathered"] = pl.gather({"rank": me.replica, "name": "é" * me.replica, "list": [None, 1.5]})
told["shapes"] = [t.tolist() for t in pl.gather(torch.arange(me.replica, dtype=torch.int16))]
told["first"] = pl.broadcast(["from", me.replica, torch.eye(2)] if me.rank == 0 else None)[:2]
time.sleep(0.5 * (me.replica == 1))
before = time.time()
pl.barrier()
now = time.time()
told["waited"] = now >= max(pl.gather(before))
if "train" in sys.argv:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    told["steps"] = []
    for batch in trainer.batches(x, 6, epochs=2):
        trainer.step(batch)
        told["steps"].append(pl.mean(trainer.steps))
    found = trainer.evaluate(x, lambda m, x: m(x).mean())
    told["evaluated"] = pl.mean(found) == found
print(json.dumps(told))
"""

ELSEWHERE = {
    "3 replicas, with steps in between": ("--replicas 3", "train", 3, 1),
    "2 replicas, torch.distributed": ("--replicas 2 --exchange collective", "train", 2, 1),
    "2 hosts of 2 replicas": ("--replicas 4 --emulate hosts=2,link=1gbit", "train", 4, 1),
    "2 replicas of 2 devices": ("--replicas 2 --tiles 2", "", 2, 2),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_every_replica_gets_what_all_have_given(where: str, start: Start) -> None:
    flags, arguments, replicas, devices = ELSEWHERE[where]
    if "--emulate" in flags and os.geteuid() != 0:
        pytest.skip("hosts are emulated by network namespaces, which only root may make")
    run = start(CALLS, flags, arguments).fine()
    middle = (replicas - 1) / 2
    expected = {
        "mean": middle,
        "dict": {"loss": [middle, middle], "right": 1 / replicas},
        "large": 2_999_999 * (middle + 1),
        "gathered": [{"rank": rank, "name": "é" * rank, "list": [None, 1.5]} for rank in range(replicas)],
        "shapes": [list(range(rank)) for rank in range(replicas)],
        "first": ["from", 0],
        "waited": True,
    }
    if arguments:
        expected |= {"steps": list(range(1, 9)), "evaluated": True}
    for process in range(replicas * devices):
        assert run.said(process) == [expected]


DEATHS = """
import json, os, signal, paceline as pl
from paceline.exchange.board import Board
me = pl.place().rank
calls = 0
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
def die_at_second(board, *args, **kwargs):
    global calls
    calls += 1
    die() if calls == 2 else awaiting(board, *args, **kwargs)
awaiting = Board.await_posts
for number in range(5):
    if (me, number) == (2, 1):
        Board.await_posts = die  # the others know that it is there
    if (me, number) == (0, 2):
        Board.await_posts = die_at_second  # it has made the memory, and has told the others where
    if (me, number) == (1, 3):
        Board.await_arrivals = die  # it has given its value
    print(json.dumps({"number": number, "ranks": pl.gather(me)}))
try:
    pl.broadcast(me)
except pl.PacelineError as error:
    print(json.dumps({"refused": str(error)}))
"""


def test_a_death_in_a_call_is_survived_and_all_get_the_same(start: Start) -> None:
    run = start(DEATHS, "--replicas 4 --timeout 40").fine()
    assert run.count("died") == 3
    assert run.all_told("ranks", 3) == [[0, 1, 2, 3], [0, 1, 3], [1, 3], [1, 3], [3]]
    assert run.all_told("ranks", 1) == [[0, 1, 2, 3], [0, 1, 3], [1, 3]]
    assert run.told("refused", 3) == "pl.broadcast has nothing to give: replica 0, whose value it is, has ended"
    run.assert_nothing_left()


def test_calls_that_do_not_belong_together_are_one_sentence(start: Start) -> None:
    run = start("import paceline as pl\npl.barrier()\n(pl.gather if pl.place().rank else pl.mean)(1)", "--replicas 2")
    assert "replica 1 calls pl.gather" in run.end().err
    assert "replica 0 calls pl.mean" in run.err


def test_one_that_was_started_again_is_told_that_it_cannot_take_part(start: Start) -> None:
    script = """
import os, pathlib, signal, time, paceline as pl
pl.barrier()
if pl.place().rank and not pathlib.Path("killed").exists():
    pathlib.Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if not pl.place().rank:
    time.sleep(60)
"""
    run = start(script, "--replicas 2 --on-failure restart").end()
    assert "replica 1 was started again, and nobody can tell it what the others have got" in run.err
    assert "with pl.barrier give --on-failure continue" in run.err


def test_replicas_on_servers_are_told_that_none_of_their_calls_belong_together(start: Start) -> None:
    run = start("import paceline as pl\nprint(pl.mean(1))", "--replicas 2 --servers 1").end()
    assert run.code
    assert "servers is 1: pl.mean is for replicas that make every step together" in run.err
