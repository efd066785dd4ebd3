"""torch.distributed on shared memory: every collective by its definition, and what torch builds on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from group_cases import CASES
from torch import distributed as dist

from paceline.errors import LaunchError, Stalled
from paceline.torch_group import rank_group as company

RANKS = 3
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What went wrong in each case, by rank; None where nothing did."""
    store = tmp_path_factory.mktemp("group") / "store"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.launch.script",
                str(HERE / "group_cases.py"),
                str(rank),
                str(RANKS),
                str(store),
            ],
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


def test_ranks_on_different_hosts_are_told() -> None:
    store = dist.HashStore()
    store.set("rank-1", "another-host/17")
    with pytest.raises(LaunchError, match="ranks 0 and 1 of the process group run on different hosts"):
        company.RankGroup(store, 0, 2, 5.0, [])


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(company, "LEAST_MEETING_S", 0.0)
    store = dist.HashStore()
    store.set("rank-1", "somewhere/17")
    with pytest.raises(Stalled, match=r"rank 0 has waited 0\.1 s for rank 2 to come"):
        company.RankGroup(store, 0, 3, 0.1, [])
