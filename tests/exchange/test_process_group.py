"""torch.distributed on shared memory: every collective by its definition, and what torch builds on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from group_cases import CASES

RANKS = 3
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What went wrong in each case, by rank; None where nothing did."""
    store = tmp_path_factory.mktemp("group") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "group_cases.py"), str(rank), str(RANKS), str(store)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=110)
            lines = [json.loads(line) for line in out.splitlines()]
            found.append({line["case"]: line["wrong"] for line in lines})
            assert lines, err
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("name", CASES)
def test_three_processes(said: list[dict[str, str | None]], name: str) -> None:
    for rank in range(RANKS):
        assert name in said[rank], f"rank {rank} has not come to it: an earlier case failed"
        assert said[rank][name] is None, f"rank {rank}: {said[rank][name]}"
