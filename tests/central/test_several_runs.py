"""Several runs in one container at the same time: each as if it were alone, on the same parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_containers import DATA, Servers, Tied, gone, loss, training
from test_recovery import Training, killed_at_once
from torch import nn

from paceline.central.container import runs as runs_module
from paceline.central.durability.snapshot import save
from paceline.central.messages.replies import Settled, Ticket
from paceline.central.messages.requests import Ask, Report
from paceline.central.shards import plain_options
from paceline.errors import PacelineError
from paceline.loss_value import LossPart, MeanPart
from paceline.rules import Async, Sync


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.setattr(runs_module, "LEAVE_WITHIN_S", 0.2)  # a refusal should not take longer
    with contextlib.closing(Servers(tmp_path)) as found:
        yield found


def steps_of_one_process(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What plain torch makes of these batches, one after another."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return model.state_dict()


def test_two_runs_take_turns_as_one_process_would(servers: Servers) -> None:
    """Parameters and optimizer state are the container's; samples, epochs, steps and the end are each run's own."""
    torch.manual_seed(0)
    plain, seen = Tied(), []
    with (
        training(servers, "shared", rule=Async()) as left,
        training(servers, "shared", run="second", seed=7, rule=Async()) as right,
    ):
        mine, theirs = left.batches(DATA, 8, epochs=2, seed=1), right.batches(DATA, 6, epochs=1, seed=2)
        for batch in mine:
            left.step(batch)
            seen.append(batch)
            other = next(theirs, None)
            if other is not None:
                right.step(other)
                seen.append(other)
        assert next(theirs, None) is None
        assert (left.steps, right.steps) == (6, 4)
        for run, samples in ((left, 48), (right, 24)):
            assert run.ledger is not None
            run.ledger.check()
            assert sum(stop - start for _, start, stop in run.ledger.record().committed) == samples
        with servers.reader("shared") as reader:
            step, tensors = reader.parameters()
            (listed,) = reader.listing()
            runs = reader.summary().runs
    assert step == 10
    assert (listed.runs, listed.replicas) == (2, 2)
    assert [(run.step, run.seen, run.replicas) for run in runs] == [(6, 48, [0]), (4, 24, [0])]
    for key, value in steps_of_one_process(plain, seen).items():
        if not key.startswith("norm.running") and "num_batches" not in key:  # of whoever reported last
            torch.testing.assert_close(tensors[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_steps_of_others_count_as_staleness(servers: Servers) -> None:
    with (
        training(servers, "stale", rule=Async()) as left,
        training(servers, "stale", run="second", rule=Async()) as right,
    ):
        theirs = right.batches(DATA, 8, epochs=1)
        inner, between = left.model.forward, iter([2, 0, 1])

        def forward(x: torch.Tensor) -> torch.Tensor:
            for _ in range(next(between)):  # while this replica computes, the other run makes steps
                right.step(next(theirs))
            return inner(x)

        left.model.forward = forward  # type: ignore[method-assign]
        for batch in left.batches(DATA, 8, epochs=1):
            left.step(batch)
        assert left.staleness == {2: 1, 0: 1, 1: 1}
        assert right.staleness == {0: 3}


def test_the_end_of_one_run_leaves_the_others_untouched(servers: Servers) -> None:
    with training(servers, "ends", replicas=2, rule=Async()) as left:
        mine = left.batches(DATA, 4, epochs=1, seed=1)
        left.step(next(mine))
        with training(servers, "ends", run="second", rule=Async()) as right:
            right.step(next(right.batches(DATA, 8, epochs=3)))  # it ends in the middle of an epoch
        with training(servers, "ends", run="third", rule=Async()) as right:
            assert right.steps == 0  # as if it were alone
            for batch in right.batches(DATA, 8, epochs=1):
                right.step(batch)
        for batch in mine:
            left.step(batch)
        assert left.steps == 6
        assert left.ledger is not None
        left.ledger.check()
    gone(servers, "ends")
    for server in servers.servers:  # places of runs that are over are free again when the next one comes alone
        assert len(server.container("ends").arena.places) > 1
    with training(servers, "ends", run="fourth", rule=Sync()) as alone:
        assert alone.steps == 3  # goes on with the books of the one that came last
        alone.step(next(alone.batches(DATA, 8, epochs=2)))
        for server in servers.servers:
            assert list(server.container("ends").arena.places) == [0]
            assert server.container("ends").step == 6 + 1 + 3 + 1


def test_what_would_change_the_others_training_is_refused(servers: Servers, tmp_path: Path) -> None:
    with training(servers, "alone") as trainer:
        trainer.step(next(trainer.batches(DATA, 8, epochs=1)))
        trainer.save(tmp_path / "one.safetensors")
    with (
        training(servers, "shared", rule=Async()) as left,
        training(servers, "shared", run="second", rule=Async()) as right,
    ):
        left.step(next(left.batches(DATA, 8, epochs=1)))
        with pytest.raises(PacelineError, match="is being trained by other runs: this one cannot be sync"):
            right.rule = Sync()
        with pytest.raises(PacelineError, match="other runs: this one cannot take over a checkpoint"):
            right.resume(tmp_path / "one.safetensors")
        assert (left.steps, right.steps) == (1, 0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rule": Sync()}, r"trained by another run, replicas 0, and this one is sync: wait for its end, give another"),
        ({"rule": Async(), "nesterov": True}, r"with other options: the optimizer's nesterov cannot be True"),
        (
            {"rule": Async(), "model": nn.Linear(6, 6)},
            r"holds another model: weight of shape",
        ),
        ({"rule": Async(), "durability": "log"}, r"replicas 0, with --durability none: give the same"),
    ],
)
def test_runs_that_do_not_go_together_are_refused_by_name(
    servers: Servers, given: dict[str, object], sentence: str
) -> None:
    with training(servers, "first", rule=Async()) as trainer:
        trainer.step(next(trainer.batches(DATA, 8, epochs=1)))
        with (
            pytest.raises(PacelineError, match=sentence),
            training(servers, "first", run="second", **given),  # type: ignore[arg-type]
        ):
            pass


def test_an_async_run_is_refused_where_a_sync_one_trains(servers: Servers) -> None:
    with (
        training(servers, "sync"),
        pytest.raises(PacelineError, match=r"replicas 0, which is sync: .*have all runs in one container be async"),
        training(servers, "sync", run="second", rule=Async()),
    ):
        pass


def test_a_replica_that_comes_back_to_books_that_are_gone_is_told(servers: Servers) -> None:
    """It would make its whole training once more, on top of what it has made."""
    with training(servers, "gone", rule=Async()) as trainer:
        trainer.step(next(trainer.batches(DATA, 8, epochs=1)))
    gone(servers, "gone")
    with training(servers, "gone", run="second", rule=Async()) as other:
        other.step(next(other.batches(DATA, 8, epochs=1)))
        with (
            pytest.raises(PacelineError, match="has let this run go: none of its replicas was there when another came"),
            training(servers, "gone", run="first", rule=Async()),
        ):
            pass


# ── after a kill ─────────────────────────────────────────────────────────────────────────────────────────────


class Two(Training):
    """A chief with two runs in its container."""

    def open_second(self) -> None:
        settings = msgspec.structs.replace(self.container.settings, run="second", replicas=1)
        assert self.runs.open(self.container.spec, settings, self.container.addresses, [])
        save(self.share, wait=True)
        self.container.admit(2, 1)
        self.runs.latest.presence.join(0, 1)

    def ask_of(self, run: int, replica: int) -> Ticket:
        training = self.runs.all[run]
        self.container.pull(training.state.first + replica)
        whose = {"container": "", "replica": replica, "incarnation": 1}
        request = Ask(**whose, chapter=0, length=40, batch_size=4, left_out=0, stop_epoch=9)  # type: ignore[arg-type]
        answer = training.ask(request)
        assert isinstance(answer, Ticket)
        return answer

    def report_of(self, run: int, replica: int, ticket: Ticket, count: float | None = None) -> Settled:
        training = self.runs.all[run]
        self.push(training.state.first + replica, ticket)
        options = [plain_options(group) for group in self.optimizer.param_groups]
        whose = {"container": "", "replica": replica, "incarnation": 1}
        loss = LossPart(MeanPart(0.5, count))
        report = Report(**whose, ticket=ticket.ticket, pulled=ticket.version, loss=loss, options=options)  # type: ignore[arg-type]
        answer = training.report(report, b"")
        assert isinstance(answer, Settled)
        return answer

    def state(self) -> list[Any]:
        books = [msgspec.structs.replace(run.books(), next_ticket=0) for run in self.runs.all]
        return [*super().state(), books, [run.state.first for run in self.runs.all]]

    def train_both(self, rounds: int) -> None:
        """A replica of the first run is always stale by one step of the second."""
        for _ in range(rounds):
            first = self.ask_of(0, 1)
            second = self.ask_of(1, 0)
            assert self.report_of(1, 0, second).accepted is not None
            assert self.report_of(0, 1, first).accepted is not None


def test_a_server_comes_back_with_both_runs_bit_by_bit(tmp_path: Path) -> None:
    training = Two(tmp_path, Async(stale="compensate:0.5"))
    training.train(2)
    training.container.reopened = True  # its first values are there
    training.open_second()
    assert training.runs.latest.state.places == range(2, 3)
    training.train_both(3)
    staleness = [run.books().staleness for run in training.runs.all]
    assert staleness == [{0: 2, 1: 2 + 3}, {0: 3}]
    assert [(run.state.chief.step, run.state.chief.version) for run in training.runs.all] == [(7, 10), (3, 10)]
    killed_at_once(training)
    training.train_both(2)
    training.runs.all[1].set_rule(Async(bound=4))
    training.runs.all[0].leave(0, 1)
    before = [run.presence.members for run in training.runs.all]
    killed_at_once(training)
    assert [run.presence.members for run in training.runs.all] == before == [[1], [0]]
    assert [run.state.chief.rule for run in training.runs.all] == [Async(stale="compensate:0.5"), Async(bound=4)]
    training.train_both(1)
    assert training.container.step == 16


def test_places_are_given_out_again_when_nobody_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Two(tmp_path, Async())
    training.train(1)
    training.container.reopened = True
    training.open_second()
    training.train_both(1)
    for replica in range(2):
        training.runs.all[0].leave(replica, 1)
    monkeypatch.setattr(runs_module, "RETURN_WITHIN_S", -1.0)
    settings = msgspec.structs.replace(training.container.settings, run="third", replicas=1)
    assert training.runs.open(training.container.spec, settings, training.container.addresses, [])
    assert [run.state.places for run in training.runs.all] == [range(2, 3), range(1)]
    assert list(training.container.arena.places) == [2]


def test_a_run_that_has_failed_does_not_stop_the_others(tmp_path: Path) -> None:
    training = Two(tmp_path, Async())
    training.container.reopened = True
    training.open_second()
    with pytest.raises(PacelineError, match="the counts of the whole batch add up to nothing"):
        training.report_of(1, 0, training.ask_of(1, 0), count=0.0)
    assert training.report_of(0, 1, training.ask_of(0, 1)).step == 1
    with pytest.raises(PacelineError, match="the counts of the whole batch add up to nothing"):
        training.ask_of(1, 0)
