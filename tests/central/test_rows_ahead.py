"""Rows that are asked for before the model runs: the right ones, in time, and never an old value."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, Start
from torch import nn

from paceline.central.tables.embedding import Found, Lookup
from paceline.central.tables.inputs import CREDIT, Inputs, tensors_of
from paceline.central.tables.rows_ahead import RowsAhead
from paceline.errors import PacelineError

CASES = Path(__file__).with_name("rows_cases.py")
CALLS = {"columns": 3, "passes": 2 * 3, "casts": 1}  # of tables, in a step


# ── in a run ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plain(start: Start) -> Run:
    return start(CASES, None).fine()


@pytest.fixture(scope="module", params=["--replicas 2 --servers 2", "--replicas 2 --servers 1 --in-graph"])
def run(request: pytest.FixtureRequest, start: Start) -> Run:
    return start(CASES, f"{request.param} --exchange tcp").fine()


@pytest.mark.parametrize("case", [*CALLS, "changes"])
def test_losses_are_those_of_one_process(case: str, run: Run, plain: Run) -> None:
    one, many = plain.told(case), run.told(case)
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert many["measured"] == pytest.approx(one["measured"], rel=1e-4)


@pytest.mark.parametrize("case", CALLS)
def test_all_rows_are_asked_for_ahead_once_it_is_known_where_they_come_from(case: str, run: Run) -> None:
    told = run.told(case)
    assert told["used"] == CALLS[case] * (told["steps"] - 1)
    assert told["guessed"] > 0, "never before the ticket was there"


def test_rows_of_a_batch_that_is_changed_are_pulled_when_they_are_needed(run: Run) -> None:
    assert run.told("changes")["used"] == 0


def test_async_rows_are_asked_for_with_the_parameters_and_no_update_is_lost(run: Run, plain: Run) -> None:
    assert run.told("async")["measured"] == pytest.approx(plain.told("async")["measured"], rel=1e-5)
    for replica in range(len(list(run.path.glob("replica-*.log")))):
        told = run.told("async", replica)
        assert told["used"] <= told["steps"]
        assert told["used"] > 0 or told["steps"] < 2


def test_servers_that_die_with_rows_under_way_change_nothing(start: Start, plain: Run) -> None:
    flags = "--replicas 2 --servers 2 --exchange tcp --durability log --max-restarts 100"
    killed = start(CASES, flags, "--kill").fine(150)
    assert killed.count("server started") == 4
    # A chief that follows one that has died does not know the tickets of that one: those steps are computed again.
    losses = [loss for loss, _ in groupby(killed.told("columns")["losses"])]
    assert losses == pytest.approx(plain.told("columns")["losses"], rel=1e-4)
    assert killed.told("columns")["used"] > 0


# ── where inputs come from ───────────────────────────────────────────────────────────────────────────────────


def learned(inputs: Inputs, batch: Any, *calls: torch.Tensor) -> None:
    inputs.begin_pass(tensors_of(batch))
    for call in calls:
        inputs.called(call)


def test_columns_slices_casts_and_whole_tensors_are_found_again() -> None:
    inputs, whole, table = Inputs(), torch.arange(6), torch.arange(30, dtype=torch.int32).view(6, 5)
    learned(inputs, [whole, {"ids": table}], whole, table[:, 3], table[1:4, ::2], table.long(), whole.view(2, 3))
    other, more = torch.arange(6) + 50, table + 100
    found = inputs.expected(tensors_of([other, {"ids": more}]))
    wanted = [other, more[:, 3], more[1:4, ::2], more.long(), other.view(2, 3)]
    assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(found, wanted, strict=True))


def test_a_smaller_batch_has_whole_tensors_and_columns_and_no_other_views() -> None:
    inputs, whole, table = Inputs(), torch.arange(6), torch.arange(30).view(6, 5)
    learned(inputs, (whole, table), whole, table[:, 3], table[1:4])
    found = inputs.expected(tensors_of((torch.arange(2), table[:2])))
    assert [each.tolist() for each in found] == [[0, 1], [3, 8]]


def test_a_view_of_the_same_memory_outside_of_the_tensor_is_not_taken_for_it() -> None:
    inputs, memory = Inputs(), torch.arange(100)
    learned(inputs, memory[10:20], memory[15:25], memory[0:12])
    assert inputs.expected(tensors_of(torch.arange(10))) == []


def test_calls_that_no_longer_happen_are_no_longer_expected() -> None:
    inputs, one, other = Inputs(), torch.arange(4), torch.arange(4, 9)
    learned(inputs, (one, other), one, other)
    learned(inputs, (one, other), other)
    inputs.begin_pass([])
    assert [each.tolist() for each in inputs.expected([one, other])] == [other.tolist()]


def test_after_wrong_guesses_there_are_no_more() -> None:
    inputs, batch = Inputs(), torch.arange(4)
    learned(inputs, batch, batch)
    for _ in range(CREDIT - 1):
        inputs.judge(right=False)
    assert len(inputs.expected([batch])) == 1
    inputs.judge(right=False)
    assert inputs.expected([batch]) == []


# ── what was asked for ───────────────────────────────────────────────────────────────────────────────────────


class Servers:
    """Two that hold the rows of a table of numbers: row r is r everywhere."""

    def __init__(self) -> None:
        self.step, self.asked, self.failure = 5, 0, None

    def pull(self, server: int, table: int, ids: torch.Tensor, received: torch.Tensor, at_least: int) -> int:
        if self.failure is not None:
            raise self.failure
        assert self.step >= at_least
        self.asked += len(ids)
        received.copy_((ids * 2 + server)[:, None].expand_as(received))
        return self.step


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def ahead(servers: Servers) -> RowsAhead:
    ahead = RowsAhead([Lookup("table", nn.Embedding(50, 2, sparse=True), 0)], 2, servers.pull)
    batch = torch.arange(4)
    ahead.begin_pass(batch)
    assert ahead.take(0, batch) is None
    return ahead


def looked_up(found: Found) -> list[float]:
    return found.values[found.places][..., 0].flatten().tolist()


def test_what_was_asked_for_answers_one_call(ahead: RowsAhead) -> None:
    ids = torch.tensor([7, 4, 4, 9])
    ahead.expect([ids], 5)
    answer = ahead.take(0, ids.clone())
    assert answer is not None
    assert looked_up(answer[0]) == ids.tolist()
    assert answer[1] == 5
    assert ahead.take(0, ids) is None


def test_a_batch_that_is_changed_afterwards_is_not_answered(ahead: RowsAhead) -> None:
    ids = torch.tensor([7, 4, 4, 9])
    ahead.expect([ids], 5)
    ids.add_(1)
    assert ahead.take(0, ids) is None


def test_nothing_is_asked_for_twice(ahead: RowsAhead, servers: Servers) -> None:
    for _ in range(2):
        ahead.expect([torch.tensor([7, 4, 4, 9])], 5)
    assert ahead.take(0, torch.tensor([7, 4, 4, 9])) is not None
    assert servers.asked == 3


def test_rows_that_do_not_exist_are_left_to_the_model_to_complain_about(ahead: RowsAhead, servers: Servers) -> None:
    ids = torch.tensor([7, 50])
    ahead.expect([ids], 5)
    assert ahead.take(0, ids) is None
    assert servers.asked == 0


def test_a_failure_ahead_leaves_the_pull_to_the_call(ahead: RowsAhead, servers: Servers) -> None:
    servers.failure = PacelineError("the server has no such table")
    ids = torch.tensor([7])
    ahead.expect([ids], 5)
    assert ahead.take(0, ids) is None
