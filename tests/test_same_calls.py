"""The ledger's proof holds only if all replicas draw alike: what decides that is compared before a step is made."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import TESTS, Run, Start

SCRIPT = TESTS / "same_calls.py"
ROWS, INDICES = r"'float32\[4\] \(checksum \w{8}\)'", r"'Subset \w{8} of Rows'"
LISTED = r"'{} \(checksum \w{{8}}\)'"
STREAM = r"'Stream, first sample \w{8}'"
# By case: what differs, as process 0 has it and as process 1 has it; in which call.
DIFFERENCES = {
    "seed": ("seed", "0", "1", "call 1 of trainer.batches"),
    "length": ("dataset length", "38", "39", "call 1 of trainer.batches"),
    "batch_size": ("batch_size", "4", "8", "call 1 of trainer.batches"),
    "epochs": ("epochs", "1", "2", "call 1 of trainer.batches"),
    "shuffle": ("shuffle", "False", "True", "call 1 of trainer.batches"),
    "drop_last": ("drop_last", "False", "True", "call 1 of trainer.batches"),
    "values": ("dataset", ROWS, ROWS, "call 1 of trainer.batches"),
    "indices": ("dataset", INDICES, INDICES, "call 1 of trainer.batches"),
    "pairs": ("dataset", LISTED.format("list"), LISTED.format("list"), "call 1 of trainer.batches"),
    "files": ("dataset", LISTED.format("Files"), LISTED.format("Files"), "call 1 of trainer.batches"),
    "stream": ("dataset", STREAM, STREAM, "call 1 of trainer.batches"),
    "class": ("dataset", "'Rows'", "'SameRows'", "call 1 of trainer.batches"),
    "accumulate": ("accumulate", "1", "2", "call 1 of trainer.batches"),
    "clip_norm": ("clip_norm", "1.0", "0.5", "call 1 of trainer.batches"),
    "order": ("dataset length", "40", "8", "call 1 of trainer.batches"),
    "more": ("dataset length", "40", "8", "call 2 of trainer.batches"),
    "evaluation length": ("dataset length", "40", "39", "trainer.evaluate"),
    "evaluation values": ("dataset", ROWS, ROWS, "trainer.evaluate"),
    "evaluation batch_size": ("batch_size", "8", "9", "trainer.evaluate"),
    "evaluation metric": (
        "metric",
        r"'largest \(same_calls.py:\d+\)'",
        r"'smallest \(same_calls.py:\d+\)'",
        "trainer.evaluate",
    ),
}
WAYS = {
    "mirrored": ("--replicas 2", "replica 0", "replica 1"),
    "over links": ("--replicas 2 --exchange collective", "replica 0", "replica 1"),
    "servers": ("--replicas 2 --servers 1", "replica 0", "replica 1"),
    "async": ("--replicas 2 --servers 1 --async", "replica 0", "replica 1"),
    "cut, on servers": ("--stages 2 --servers 1", "device 0 of replica 0", "device 1 of replica 0"),
}
# The chief compares what replicas draw under every rule.
EVERY_WAY = [pytest.param(way, marks=[pytest.mark.soak] if way == "async" else []) for way in WAYS]
Ended = Callable[[str], Run]


@pytest.fixture(scope="module")
def ended(start: Start) -> Ended:
    """The run of each way, once."""
    runs: dict[str, Run] = {}

    def ended(way: str) -> Run:
        if way not in runs:
            runs[way] = start(SCRIPT, f"{WAYS[way][0]} --timeout 30").end()
        return runs[way]

    return ended


def sentence_of(case: tuple[str, str, str, str], zero: str, one: str) -> str:
    """A pattern of what is said, whoever was first."""
    field, zeros, ones, where = case
    sentence = "{} is {}: that is {}'s in {}, and {}'s is {}; give all the same"
    either = (
        sentence.format(field, zeros, zero, where, one, ones),
        sentence.format(field, ones, one, where, zero, zeros),
    )
    return "|".join(either)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_replica_that_draws_otherwise_is_told_so_before_a_step_is_made(way: str, ended: Ended) -> None:
    run, (flags, zero, one) = ended(way), WAYS[way]
    for name, case in DIFFERENCES.items():
        told = [run.told(name, replica) for replica in (0, 1)]
        assert any(told), name
        # With servers nobody waits in an evaluation, nor in an async run: one may be done when the other comes.
        assert all(told) or "async" in flags or ("servers" in flags and name.startswith("evaluation")), (name, told)
        for sentence in filter(None, told):
            refused = name == "stream" and sentence == "dataset is 'a stream': with servers give one that has a length"
            told_how = re.fullmatch(sentence_of(case, zero, one), sentence)
            assert told_how or (refused and "servers" in flags), (name, sentence)
    assert way == "async" or run.all_told("stepped", 0) == run.all_told("stepped", 1) == []


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("cut")])
def test_a_metric_that_returns_something_else_on_one_replica_is_told(way: str, ended: Ended) -> None:
    """Of the devices of a cut replica one speaks for all."""
    told = [ended(way).told("evaluation returns", replica) for replica in (0, 1)]
    assert any(told)
    for sentence in filter(None, told):
        assert re.fullmatch(
            r"metric is 'mean(, largest)?': that is what it returns here, and on another replica it returns something "
            "else; give all the same",
            sentence,
        )


@pytest.mark.parametrize("way", EVERY_WAY)
def test_such_a_run_ends_with_that_sentence(way: str, ended: Ended) -> None:
    run, (_, zero, one) = ended(way), WAYS[way]
    assert run.code == 1
    assert re.fullmatch(sentence_of(("seed", "7", "8", "call 1 of trainer.batches"), zero, one), run.sentence)
    run.assert_nothing_left()


JOINING = """
import os, signal, time, torch, paceline as pl
from pathlib import Path
from torch import nn

place, again = pl.place(), Path("again")
if place.restarted:
    again.touch()
torch.manual_seed(0)
model, x = nn.Linear(4, 1), torch.randn(400, 4)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
for batch in trainer.batches(x, 4, epochs=20, seed=int(place.restarted)):
    trainer.step(batch)
    if place.rank == 1 and not place.restarted and trainer.steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    while trainer.steps == 10 and not again.exists():
        time.sleep(0.01)
    if trainer.steps > 10:
        time.sleep(0.005)
"""


def test_a_replica_that_joins_and_draws_otherwise_is_told_so(start: Start) -> None:
    run = start(JOINING, "--replicas 2 --on-failure restart --max-restarts 1 --timeout 30").end()
    assert run.code == 1
    case = ("seed", "0", "1", "call 1 of trainer.batches")
    assert re.search(sentence_of(case, "replica 0", "replica 1"), run.err), run.err
    assert "Traceback" not in run.err
