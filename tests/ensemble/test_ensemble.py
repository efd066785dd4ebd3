"""Ensembles: the same numbers in one process and in several, late and dead members, what is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.ensemble.members_between import MembersBetween
from paceline.errors import InvalidInput, ModelError, PacelineError, ReplicaDied


class Member(nn.Module):
    """A linear model that can be told to be late, to fail or to die, by what it is asked."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number = number
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, late: int = -1, fails: int = -1, gate: str = "") -> torch.Tensor:
        if late == self.number:
            while not os.path.exists(gate):
                time.sleep(0.001)
        if fails == self.number:
            raise ValueError("too large")
        return self.inner(x)


@pytest.fixture(scope="module")
def members() -> list[Member]:
    return [Member(number) for number in range(3)]


@pytest.fixture(scope="module", params=["here", "between"])
def ensemble(request: pytest.FixtureRequest, members: list[Member]) -> Iterator[pl.Ensemble]:
    with pl.Ensemble(members, where=request.param) as made:
        yield made


def alone(members: list[Member], x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [member.eval().inner(x) for member in members]


def test_the_mean_of_probabilities_of_all_members(ensemble: pl.Ensemble, members: list[Member]) -> None:
    x = torch.randn(5, 4)
    answer = ensemble(x)
    each = alone(members, x)
    assert answer.members == ("0", "1", "2")
    assert not answer.missing
    assert all(torch.equal(answer.answers[str(at)], one) for at, one in enumerate(each))
    assert torch.allclose(answer.value.softmax(-1), torch.stack([one.softmax(-1) for one in each]).mean(0), atol=1e-6)


def test_both_forms_have_the_same_numbers_to_the_bit(members: list[Member]) -> None:
    x = torch.randn(7, 4)
    found = []
    for where in ("here", "between"):
        with pl.Ensemble(members, where=where, combine="weighted", weights=[1, 2, 3]) as ensemble:  # type: ignore[arg-type]
            found.append(ensemble(x).value)
    assert torch.equal(*found)


def test_a_late_answer_is_never_given_to_a_later_question(
    ensemble: pl.Ensemble, members: list[Member], tmp_path: object
) -> None:
    gate = f"{tmp_path}/gate"
    first = ensemble(torch.zeros(2, 4), late=1, gate=gate, timeout_s=5)
    assert first.members == ("0", "2")
    assert first.missing == {"1": "it was not done within 5 s"}
    open(gate, "w").close()  # now it goes on, with the question that nobody waits for
    x = torch.randn(2, 4)
    for _ in range(3):
        answer = ensemble(x)
        assert answer.members == ("0", "1", "2")
        for at, one in enumerate(alone(members, x)):
            assert torch.equal(answer.answers[str(at)], one)


def test_fewer_than_the_quorum_in_time_names_the_late(ensemble: pl.Ensemble, tmp_path: object) -> None:
    gate = f"{tmp_path}/gate"
    slow = [threading.Thread(target=lambda at=at: ensemble(torch.zeros(1, 4), late=at, gate=gate)) for at in (0, 1)]
    for thread in slow:
        thread.start()

    # Both are busy with somebody else's question, which is waited for as long as it takes.
    def ask_until_both_are_late() -> None:
        with pl.deadline(3):
            while True:
                ensemble(torch.zeros(1, 4))

    with pytest.raises(pl.DeadlineExceeded, match=r"member '0', '1' was not done within 3 s"):
        ask_until_both_are_late()
    open(gate, "w").close()
    for thread in slow:
        thread.join()
    assert ensemble(torch.zeros(1, 4)).members == ("0", "1", "2")


def test_a_member_that_fails_is_missing_with_its_reason(ensemble: pl.Ensemble) -> None:
    answer = ensemble(torch.zeros(1, 4), fails=2)
    assert answer.members == ("0", "1")
    assert answer.missing == {"2": "ValueError: too large"}
    with pytest.raises(ReplicaDied, match="0 of 3 members answered and the quorum is 2"):
        ensemble(torch.zeros(1, 5))
    assert ensemble(torch.zeros(1, 4)).members == ("0", "1", "2")


def test_a_killed_member_comes_back_and_no_question_fails(members: list[Member]) -> None:
    with pl.Ensemble(members, where="between") as ensemble:
        asked = ensemble.asked
        assert isinstance(asked, MembersBetween)
        x, before = torch.randn(2, 4), asked.processes
        os.kill(before[1], signal.SIGKILL)
        missing, until = [], time.monotonic() + 60
        while asked.processes[1] == before[1] or not all(asked.ready):
            missing += ensemble(x, timeout_s=30).missing.items()
            assert time.monotonic() < until
        assert set(dict(missing)) <= {"1"}
        answer = ensemble(x)
        assert answer.members == ("0", "1", "2")
        assert torch.equal(answer.answers["1"], alone(members, x)[1])
        assert asked.processes[0] == before[0]


@pytest.mark.parametrize("where", ["here", "between"])
def test_predictors_as_members_and_questions_that_are_open_at_the_end(
    members: list[Member], where: str, tmp_path: object
) -> None:
    x, gate = torch.randn(2, 4), f"{tmp_path}/gate"
    ensemble = pl.Ensemble({f"m{member.number}": pl.load(None, member) for member in members}, where=where)  # type: ignore[arg-type]
    with pl.deadline(60):
        answer = ensemble(x)
    assert answer.members == ("m0", "m1", "m2")
    assert torch.equal(answer.answers["m2"], alone(members, x)[2])
    told: list[str] = []

    def ask() -> None:
        try:
            told.append(str(ensemble(x, late=0, gate=gate).missing))
        except PacelineError as error:  # also one that comes after the end
            told.append(str(error))

    callers = [threading.Thread(target=ask, daemon=True) for _ in range(2)]  # one inside, one behind it
    for caller in callers:
        caller.start()
    missing: dict[str, str] = {}
    while "m0" not in missing:  # until it is busy with their questions
        missing = ensemble(x, timeout_s=5).missing
    ender = threading.Thread(target=ensemble.close)
    ender.start()
    open(gate, "w").close()
    for thread in (*callers, ender):
        thread.join(60)
        assert not thread.is_alive()
    assert len(told) == 2


def test_what_is_refused(members: list[Member]) -> None:
    for error, given in {
        "members is \\[\\]: give at least one": {"members": []},
        "quorum is 4: give a whole number from 1 to 3": {"quorum": 4},
        "quorum is 2: stacked weights belong together": {"combine": "stacked", "weights": [1, 1, 1], "quorum": 2},
        "combine is 'best': give one of mean": {"combine": "best"},
        "combine is 'weighted': it needs weights": {"combine": "weighted"},
        "combine is 'mean': only weighted, stacked": {"weights": [1, 2, 3]},
        "combine is 'mean': labels can be combined by majority": {"outputs": "labels"},
        "weights is \\[1\\]: give one for each of the 3": {"combine": "weighted", "weights": [1]},
        "weights is \\[0, 0, 0\\]: give numbers from 0 up": {"combine": "weighted", "weights": [0, 0, 0]},
        "where is 'there': give 'here'": {"where": "there"},
        "devices is \\['cpu'\\]: give a list with one for each": {"devices": ["cpu"]},
        "devices is 'cpu:4096': the cores of this process are": {"devices": ["cpu:4096"] * 3},
        "member '1' is 'Member': this is the same object as member '0'": {"members": [members[0]] * 2},
        "member '0' is 'str': give models": {"members": ["a.safetensors"]},
    }.items():
        with pytest.raises(InvalidInput, match=f"^{error}"):
            pl.Ensemble(**{"members": members, **given})  # type: ignore[arg-type]


def test_members_of_different_tasks_are_refused() -> None:
    with (
        pl.Ensemble([nn.Linear(4, 3), nn.Linear(4, 2)]) as ensemble,
        pytest.raises(ModelError, match=r"\[1, 3\]: another's is \[1, 2\]"),
    ):
        ensemble(torch.zeros(1, 4))
    with pl.Ensemble([nn.Linear(4, 1)]) as ensemble, pytest.raises(ModelError, match="outputs='values'"):
        ensemble(torch.zeros(1, 4))


def test_each_member_on_the_core_that_it_is_given(members: list[Member]) -> None:
    core = sorted(os.sched_getaffinity(0))[0]
    mine = os.sched_getaffinity(0)
    seen = [lambda x, at=at: torch.tensor([float(core) for core in os.sched_getaffinity(0)]) for at in range(2)]
    for where in ("here", "between"):
        with pl.Ensemble(seen, outputs="values", devices=[f"cpu:{core}"] * 2, where=where) as ensemble:  # type: ignore[arg-type]
            assert ensemble(torch.zeros(1)).value.tolist() == [float(core)]
    assert os.sched_getaffinity(0) == mine
