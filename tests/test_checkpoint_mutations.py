"""A damaged save is never resumed from as if it were whole: see `checkpoint_mutations.py`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import TESTS


@pytest.mark.parametrize(
    ("count", "seed"),
    [(102, 0), *(pytest.param(1020, seed, marks=[pytest.mark.soak, pytest.mark.timeout(900)]) for seed in (1, 2, 3))],
)
def test_a_damaged_save_is_refused_by_name_or_changes_nothing(count: int, seed: int) -> None:
    command = [sys.executable, str(TESTS / "checkpoint_mutations.py"), str(count), str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["wrong"] == []
    assert told["grown"] < 400_000, "kilobytes that damaged files have made the process grow"
    assert sum(counts.get("refused", 0) for counts in told["counts"].values()) > count / 2
