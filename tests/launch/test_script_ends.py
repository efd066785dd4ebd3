"""What a script has left to Python at its end is done, also if Python's collector does not look at torch meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Start

LEFT = """
import gc, sys, torch, paceline as pl

class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print(self.name)

file = open(f"left-{pl.place().rank}.txt", "w")  # nobody closes it
file.write("all of it")
cycle = [Last("in a cycle")]
cycle.append(cycle)
del cycle
torch.left_here = Last("in torch")
"""

GROUP = """
import os, sys, torch
import torch.distributed as dist
import paceline as pl
import torch._dynamo  # which freezes what is there
dist.init_process_group("gloo", store=dist.FileStore(os.path.abspath("store"), 2), rank=pl.place().rank, world_size=2)
group = dist.new_group([0, 1])
for _ in range(20):
    dist.all_reduce(torch.ones(1000), group=group)
sys.exit(7 if pl.place().rank else 0)  # with its groups open
"""


@pytest.fixture(scope="module", autouse=True)
def _cold() -> Iterator[None]:
    """Ends of a user's processes, not those of the tests (`quick_end.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TESTS_COLD", "1")
        yield


@pytest.mark.parametrize("flags", [None, "--replicas 2"])
def test_files_and_finalizers_of_a_script_have_their_end(start: Start, flags: str | None) -> None:
    run = start(LEFT, flags).fine()
    for replica in range(1 if flags is None else 2):
        assert (run.folder / f"left-{replica}.txt").read_text() == "all of it"
        said = run.out if flags is None else run.log(replica)
        assert said.splitlines() == ["in a cycle", "in torch"]  # as plain python has it


def test_process_groups_that_nobody_has_closed_do_not_abort_the_end(start: Start) -> None:
    run = start(GROUP, "--replicas 2").end()
    assert run.code == 7, run.err
    assert "SIGABRT" not in run.err
