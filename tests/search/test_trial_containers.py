"""With servers that run already, every trial has a container of its own, whenever it is started."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from paceline.cli.run import add_join_arguments, add_server_arguments, add_strategy_arguments
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.tune import trial_command
from paceline.run_place import check_container
from paceline.search.script_arguments import find_arguments
from paceline.trial_values import TrialPlace


@pytest.fixture
def plan() -> RunPlan:
    parser = argparse.ArgumentParser()
    add_strategy_arguments(parser)
    add_server_arguments(parser)
    add_join_arguments(parser)
    options = parser.parse_args([__file__, "--join", "127.0.0.1:7070", "--token", "servers", "--async"])
    return resolve(argparse.Namespace(**vars(options), arguments=[]))


def container(plan: RunPlan, folder: str, fold: int | None = None) -> str:
    place = TrialPlace(number=7, parameters={}, folder=folder, metric="accuracy", seed=0, fold=fold, folds=fold and 5)
    arguments = find_arguments(__file__, (), (), module=False, folds=False)
    command = trial_command(plan, arguments, place)
    assert command[command.index("--join") + 1] == "127.0.0.1:7070"
    return check_container(command[command.index("--container") + 1])


def test_each_trial_and_fold_has_its_own(plan: RunPlan) -> None:
    assert container(plan, "/work/runs/digits-tune-1f3/trial-0007") == "digits-tune-1f3-trial-0007"
    assert (
        container(plan, "/work/runs/digits-tune-1f3/trial-0007/fold-2", fold=2) == "digits-tune-1f3-trial-0007-fold-2"
    )
    long = Path("/work") / ("x" * 200) / "trial-0007"
    assert container(plan, str(long)).endswith("x-trial-0007")
