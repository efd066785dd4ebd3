"""Damage of every sort to what a server comes back from: the state that was there, or a sentence that names the file.

`make soak` has a thousand and more of each kind; to have one of its runs again: `PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import os
import random

import pytest
from journal_mutations import Left, campaign, leave, outcome, records_of


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return leave(tmp_path_factory.mktemp("left"))


def test_an_undamaged_folder_comes_back_equal(left: Left) -> None:
    assert outcome(left) == "equal"
    assert len(records_of(left.only("log"))) > 10


@pytest.mark.parametrize("kind", ["log", "snapshot", "mark"])
def test_some_damage_is_found_or_does_not_matter(left: Left, kind: str) -> None:
    counts = campaign(left, kind, random.Random(kind), 25)
    assert counts["refused"] > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["log", "snapshot", "mark"])
def test_any_damage_is_found_or_does_not_matter(left: Left, kind: str) -> None:
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    counts = campaign(left, kind, random.Random(f"{kind} {seed}"), 1200)
    print(kind, counts)
    assert counts["refused"] > 1000
