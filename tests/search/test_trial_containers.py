"""With servers that run already, every trial has a container of its own, whenever it is started."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from paceline.cli.run_flags import add_join_arguments, add_server_arguments, add_strategy_arguments
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.tune import trial_command
from paceline.run_place import check_container
from paceline.search.script_arguments import find_arguments
from paceline.search.tune_folder import TuneFolder, identity_of
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


def search_in(path: Path) -> tuple[str, str]:
    """A new search in that folder: where, and what tells it from all others."""
    TuneFolder.open(str(path), "train.py", {}).close()
    return str(path), identity_of(path)


def test_each_trial_and_fold_has_its_own(plan: RunPlan, tmp_path: Path) -> None:
    search, identity = search_in(tmp_path / "digits-tune-1f3")
    name = f"digits-tune-1f3-{identity}-trial-0007"
    assert container(plan, f"{search}/trial-0007") == name
    assert container(plan, f"{search}/trial-0007/fold-2", fold=2) == f"{name}-fold-2"
    long, identity = search_in(tmp_path / ("x" * 200))
    assert container(plan, f"{long}/trial-0007").endswith(f"x-{identity}-trial-0007")


def test_a_search_never_goes_on_with_containers_of_another_in_a_folder_of_that_name(
    plan: RunPlan, tmp_path: Path
) -> None:
    search, identity = search_in(tmp_path / "out")
    assert search_in(tmp_path / "out") == (search, identity), "the same search, started again"
    other, _ = search_in(tmp_path / "elsewhere/out")
    first = container(plan, f"{search}/trial-0007")
    assert container(plan, f"{other}/trial-0007") != first
    shutil.rmtree(search)
    search_in(tmp_path / "out")
    assert container(plan, f"{search}/trial-0007") != first
