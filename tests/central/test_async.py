"""Asynchronous updates between processes: they converge, staleness is what is counted, no sample is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Start

CASES = Path(__file__).with_name("async_cases.py")
SAMPLES = 240
REPLICAS = 4


@pytest.fixture(scope="module")
def run(start: Start) -> Run:
    return start(
        CASES, f"--replicas {REPLICAS} --servers 1 --async --stale scale --stale-lr 0.5 --warmup-epochs 1"
    ).fine()


@pytest.fixture(scope="module")
def case(run: Run) -> Callable[[str], dict[str, Any]]:
    """What the first replica says about a case."""

    def find(name: str) -> dict[str, Any]:
        found: dict[str, Any] = run.told(name)
        found["staleness"] = {int(key): count for key, count in found["staleness"].items()}
        return found

    return find


def counted(told: dict[str, Any]) -> int:
    return sum(told["staleness"].values())


def test_a_regression_converges(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("converges")
    assert told["steps"] == 8 * SAMPLES // 8
    assert told["loss"] < 1e-3
    assert told["ledger"] == "epochs 0 to 7: 240 samples, each once"


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_staleness_is_one_less_than_there_are_equal_replicas(
    replicas: int, case: Callable[[str], dict[str, Any]]
) -> None:
    told = case(f"{replicas} equal replicas")
    mean = sum(staleness * count for staleness, count in told["staleness"].items()) / counted(told)
    assert mean == pytest.approx(replicas - 1, rel=0.1), told["staleness"]
    assert counted(told) == told["steps"] == SAMPLES // 4


@pytest.mark.parametrize("rule", ["keep", "scale", "compensate", "stale-lr"])
def test_every_gradient_is_counted_with_its_staleness(rule: str, case: Callable[[str], dict[str, Any]]) -> None:
    told = case(rule)
    assert counted(told) == told["steps"] == SAMPLES // 4
    assert told["ledger"] == "epoch 0: 240 samples, each once"
    assert max(told["staleness"]) > 0


def test_what_is_kept_counts_in_full(case: Callable[[str], dict[str, Any]]) -> None:
    assert case("keep")["at"] == pytest.approx(-SAMPLES / 4)


def test_what_is_scaled_counts_by_its_staleness(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("scale")
    expected = -sum(count / max(1, staleness) for staleness, count in told["staleness"].items())
    assert told["at"] == pytest.approx(expected, rel=1e-5)
    assert told["at"] > -SAMPLES / 4


def test_a_lower_learning_rate_is_that_of_every_update(case: Callable[[str], dict[str, Any]]) -> None:
    assert case("stale-lr")["at"] == pytest.approx(-SAMPLES / 4 * 0.25)


def test_what_is_compensated_has_the_gradient_of_the_parameters_as_they_are(
    case: Callable[[str], dict[str, Any]],
) -> None:
    """With a gradient of 1, g + lambda n g² (now - then) is 1 - lambda n staleness, to first order."""
    told = case("compensate")
    stale = sum(staleness * count for staleness, count in told["staleness"].items())
    assert told["at"] == pytest.approx(-SAMPLES / 4 + 0.01 * stale, rel=2e-3)


def test_no_correction_is_larger_than_the_gradient(case: Callable[[str], dict[str, Any]]) -> None:
    """All gradients are 1: one for which others have done something meanwhile counts nothing, and undoes nothing."""
    told = case("compensate strongly")
    assert told["at"] == int(told["at"])
    assert -told["steps"] < told["at"] <= -told["staleness"][0]


def test_what_is_dropped_gives_its_samples_back(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("drop")
    dropped = sum(count for staleness, count in told["staleness"].items() if staleness > 1)
    assert told["dropped"] == dropped > 0
    assert counted(told) == told["steps"] + told["dropped"]
    assert told["at"] == pytest.approx(-told["steps"])
    assert told["ledger"] == "epoch 0: 240 samples, each once"


def test_nobody_runs_further_ahead_than_the_bound(run: Run, case: Callable[[str], dict[str, Any]]) -> None:
    replicas = [run.told("bounded", replica) for replica in range(REPLICAS)]
    ahead = []
    for told in replicas:
        for before, moment in enumerate(told["began"]):
            slowest = min(sum(ended <= moment for ended in other["ended"]) for other in replicas)
            ahead.append(before - slowest)
    assert max(ahead) == 2
    assert case("bounded")["ledger"] == "epoch 0: 240 samples, each once"


def test_batches_are_loaded_while_others_are_computed(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("ahead")
    assert told["ledger"] == "epoch 0: 240 samples, each once"
    assert told["ahead"] >= told["own_steps"] / 2, "without reservations none is; not all are, when others are quicker"


@pytest.mark.parametrize("name", ["one breaks", "one evaluates"])
def test_what_one_has_been_given_does_not_keep_the_others_waiting(name: str, run: Run) -> None:
    assert run.told(name, 1)["ledger"] == "epoch 0: 240 samples, each once"


def test_the_rule_may_change_in_the_middle(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("changing rules")
    assert told["ledger"] == "epochs 0 to 2: 240 samples, each once"
    assert any(staleness for staleness in told["staleness"])
    assert told["staleness"][0] >= 4 * 9  # the sync part at the beginning, of all replicas
    assert told["loss"] < told["losses"][0] / 10
    assert told["late"] <= 2 * REPLICAS


def test_the_rule_is_the_one_that_was_typed(case: Callable[[str], dict[str, Any]]) -> None:
    told = case("as typed")
    weights = sum(count / max(1, staleness) for staleness, count in told["staleness"].items())
    assert told["at"] == pytest.approx(-0.5 * weights, rel=1e-5)
    assert told["ledger"] == "epochs 0 to 2: 240 samples, each once"


def test_in_a_warm_up_one_replica_works_alone(run: Run, case: Callable[[str], dict[str, Any]]) -> None:
    others = [run.told("as typed", replica)["epochs"] for replica in range(1, REPLICAS)]
    assert case("as typed")["epochs"].count(0) == SAMPLES // 4
    assert all(others)
    assert not any(0 in epochs for epochs in others)
    assert case("as typed")["staleness"][0] >= SAMPLES // 4
