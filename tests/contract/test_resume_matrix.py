"""What was saved under any strategy goes on under every other: the same position, random numbers, schedule, evaluations
that lie behind, and losses that follow, as if it had never been interrupted.

Two launches a strategy: one saves, one resumes what all have saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Start
from resume_training import SAVE_AT

SCRIPT = Path(__file__).with_name("resume_training.py")
CLOSE = 1e-9  # in float64: sums are in another order, and nothing else differs

STRATEGIES: dict[str, str | None] = {
    "one-process": None,
    "replicas": "--replicas 2",
    "collective": "--replicas 2 --exchange collective",
    "servers": "--replicas 2 --servers 2",
    "tcp": "--replicas 3 --servers 1 --exchange tcp",
    "in-graph": "--replicas 2 --servers 2 --in-graph",
    "layout": "--mesh model=2 --layout hidden=model",
    "stages": "--stages 2 --micro-batches 2",
    "stages-on-hosts": "--stages 2 --micro-batches 2 --replicas 1 --emulate hosts=2,link=1gbit",
    "cut-on-servers": "--stages 2 --servers 1",
}


SELDOM = ("collective", "tcp", "layout", "cut-on-servers")  # in `make soak`: what they combine is in others one by one
EVERY = [pytest.param(name, marks=[pytest.mark.soak] if name in SELDOM else []) for name in STRATEGIES]


@pytest.fixture(scope="module")
def whole(start: Start) -> dict[str, Any]:
    """What one process tells that was never interrupted."""
    found: dict[str, Any] = start(SCRIPT, None).fine().told("whole")
    return found


@pytest.fixture(scope="module")
def saves(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint from every strategy that a test asks for."""
    folder = tmp_path_factory.mktemp("saves")
    asked = {item.callspec.params["saved_by"] for item in request.session.items if item.path == request.path}
    for name in asked:
        start(SCRIPT, STRATEGIES[name], f"--save {folder / name}-of.safetensors").fine()
    assert len(list(folder.glob("*-of.safetensors"))) == len(asked)
    return folder


@pytest.fixture(scope="module", params=EVERY)
def resumed(request: pytest.FixtureRequest, start: Start, saves: Path) -> dict[str, Any]:
    """What one strategy tells of going on from each of them."""
    run = start(SCRIPT, STRATEGIES[request.param], f"--resume {saves}").fine(180)
    names = [path.stem.removesuffix("-of") for path in saves.glob("*-of.safetensors")]
    return {name: run.told(name) for name in names}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("saved_by", EVERY)
def test_a_run_goes_on_as_if_it_had_not_been_interrupted(
    saved_by: str, resumed: dict[str, Any], whole: dict[str, Any]
) -> None:
    found = resumed[saved_by]
    following = [number for number in whole["losses"] if int(number) >= SAVE_AT]
    assert found["began"] == SAVE_AT
    assert list(found["losses"]) == following
    assert found["ledger"] == whole["ledger"]
    assert found["rates"] == {number: whole["rates"][number] for number in following}
    assert found["drawn"] == {number: whole["drawn"][number] for number in following}
    for number in following:
        assert found["losses"][number] == pytest.approx(whole["losses"][number], rel=CLOSE)
    assert len(found["evaluations"]) == len(whole["evaluations"]) == 2
    for mine, theirs in zip(found["evaluations"], whole["evaluations"], strict=True):
        assert mine == pytest.approx(theirs, rel=CLOSE)
