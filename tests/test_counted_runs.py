"""Losses that are (sum, count) in runs of several processes: with a gradient that is a step by itself, on wires of few
bits, with tables on servers; and what replicas are told whose losses cannot be added up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import TESTS, Run, Start
from safetensors.torch import load_file

SCRIPT = TESTS / "counted_training.py"


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None).fine()


@pytest.fixture(scope="module")
def exact(start: Start) -> Run:
    """One process, on counts of a million a sample."""
    return start(SCRIPT, None, "--many").fine()


def parameters(run: Run) -> dict[str, torch.Tensor]:
    return load_file(Path(run.folder) / "model.safetensors")


def assert_like(run: Run, alone: Run, rel: float, replicas: int = 1) -> None:
    expected, seen = alone.told("losses"), set()
    for replica in range(replicas):  # with servers one has no part in a batch of two
        losses = run.told("losses", replica)
        seen |= set(losses)
        assert losses == pytest.approx({step: expected[step] for step in losses}, rel=rel)
        assert {step: means["twice"] for step, means in run.told("logged", replica).items()} == pytest.approx(
            {step: 2 * loss for step, loss in losses.items()}, rel=1e-6
        )
        assert run.told("found", replica) == pytest.approx(alone.told("found"), rel=rel)
    assert seen == set(expected)
    assert len(seen) == 8
    for name, value in parameters(alone).items():
        torch.testing.assert_close(parameters(run)[name], value, rtol=rel, atol=rel)


@pytest.mark.parametrize(
    ("flags", "replicas"),
    [
        ("--replicas 3", 3),
        ("--replicas 3 --servers 2 --exchange tcp", 3),
        ("--replicas 1 --servers 1 --async --stale compensate", 1),  # each gradient by itself: of whole batches
        pytest.param("--replicas 1 --servers 1 --bounded 1", 1, marks=pytest.mark.soak),  # the same path as async
    ],
)
def test_steps_and_evaluations_are_those_of_one_process(flags: str, replicas: int, start: Start, alone: Run) -> None:
    assert_like(start(SCRIPT, flags).fine(), alone, 1e-12, replicas)


@pytest.mark.parametrize("flags", ["--exchange collective --wire fp16", "--servers 1 --exchange tcp --wire int8"])
def test_wires_of_few_bits_carry_gradients_of_sums_over_millions(flags: str, start: Start, exact: Run) -> None:
    """As they are those would not fit into 16 bits."""
    assert_like(start(SCRIPT, f"--replicas 2 {flags}", "--many").fine(), exact, 2e-2, 2)


@pytest.mark.parametrize("flags", ["--only sparse", pytest.param("", marks=pytest.mark.soak)])
def test_tables_on_servers_are_updated_by_the_gradient_of_the_mean(flags: str, start: Start) -> None:
    exact = start(SCRIPT, None, "--table").fine()
    assert_like(start(SCRIPT, f"--replicas 2 --servers 2 {flags}", "--table").fine(), exact, 1e-4, 2)


@pytest.mark.parametrize("flags", ["", "--servers 1", pytest.param("--servers 1 --async", marks=pytest.mark.soak)])
def test_a_batch_in_which_nothing_counts_ends_the_run_with_a_sentence(flags: str, start: Start) -> None:
    run = start(SCRIPT, f"--replicas 2 {flags}", "--wrong nothing").end()
    assert run.code == 1
    assert "loss is 'a sum over 0': the counts of the whole batch add up to nothing (at step " in run.sentence
    run.assert_nothing_left()


@pytest.mark.parametrize("flags", ["", "--servers 1"])
def test_replicas_with_losses_of_different_kinds_are_told_so(flags: str, start: Start) -> None:
    run = start(SCRIPT, f"--replicas 2 {flags}", "--wrong kinds").end()
    assert run.code == 1
    assert "another part of the batch has " in run.sentence
    assert "(sum, count)" in run.sentence
    run.assert_nothing_left()
