"""What real scripts do with batches, datasets, models and losses comes to the same with replicas and with servers.

Every strategy goes through all of `script_cases.py` in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import TESTS, Run, Start
from script_cases import CASES

# With servers replicas need not take part in the same steps: here they have samples in each.
STRATEGIES = {"--replicas 2": 13, "--replicas 2 --servers 2": 14, "--replicas 2 --servers 2 --exchange tcp": 14}
EVERY = [pytest.param(flags, marks=[pytest.mark.soak] if "tcp" in flags else []) for flags in STRATEGIES]
Runs = Callable[[str | None, int], Run]
pytestmark = pytest.mark.timeout(300)  # the first test of a strategy waits for all of its cases


@pytest.fixture(scope="module")
def run_of(start: Start) -> Runs:
    """One after another: each is many processes."""
    runs: dict[tuple[str | None, int], Run] = {}

    def run_of(flags: str | None, samples: int) -> Run:
        if (flags, samples) not in runs:
            runs[flags, samples] = start(TESTS / "script_cases.py", flags, str(samples)).fine(timeout_s=120)
        return runs[flags, samples]

    return run_of


def flat(value: Any) -> list[Any]:
    return [number for item in value for number in flat(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("flags", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_replicas_and_servers_come_to_what_one_process_comes_to(case: str, flags: str, run_of: Runs) -> None:
    expected, run = run_of(None, STRATEGIES[flags]).told(case), run_of(flags, STRATEGIES[flags])
    assert flat(run.told(case)) == pytest.approx(flat(expected), rel=1e-10)
    assert run.told(case, replica=1) == run.told(case)


@pytest.mark.parametrize("flags", EVERY)
def test_nothing_is_left_behind(flags: str, run_of: Runs) -> None:
    run_of(flags, STRATEGIES[flags]).assert_nothing_left()


WORKERS = """
import json, os, signal, sys
import torch
from torch import nn
import paceline as pl

X = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

class Photos:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        if index == 31 and sys.argv[1] == "broken":
            raise ValueError("no photo")
        if index == 31 and sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return X[index] + torch.rand(3, dtype=torch.float64)

torch.manual_seed(0)
model = nn.Linear(3, 1).double()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
losses = []
for batch in trainer.batches(Photos(), 4, epochs=2, workers=2):
    if trainer.steps == 7 and trainer.replica == 1 and sys.argv[1] == "replica":
        os.kill(os.getpid(), signal.SIGKILL)
    losses.append(trainer.step(batch))
print(json.dumps({"losses": losses, "ledger": trainer.ledger.check()}))
"""


def test_a_replica_that_is_killed_takes_its_workers_along_and_its_samples_are_drawn_as_before(start: Start) -> None:
    alone, run = start(WORKERS, None, "fine"), start(WORKERS, "--replicas 2 --on-failure continue", "replica")
    alone.fine()
    run.fine()
    assert run.told("losses") == pytest.approx(alone.told("losses"), rel=1e-12)
    assert run.told("ledger") == "epochs 0 to 1: 40 samples, each once"
    run.assert_nothing_left()


def test_what_goes_wrong_in_a_worker_ends_the_run_and_says_which_sample_it_was(start: Start) -> None:
    broken, killed = (start(WORKERS, "--replicas 2", how).end() for how in ("broken", "killed"))
    assert (broken.code, killed.code) == (1, 1)
    assert "sample 31, in worker" in broken.err
    assert 'raise ValueError("no photo")' in broken.err
    assert "was killed by signal 9 (SIGKILL) while it loaded samples" in killed.sentence
    for run in (broken, killed):
        run.assert_nothing_left()
