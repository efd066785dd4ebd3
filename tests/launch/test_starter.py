"""Replicas and servers are forked from one process that has torch, and a script cannot tell but by the clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.launch.starter import pays_for
from tests.conftest import Run, Start

# What a script may look at, before it imports torch and after it.
LOOK = """
import json, os, random, sys
from pathlib import Path
{first}
before = "torch" in sys.modules
import torch
import numpy
import paceline as pl
from torch import nn
import torch.nn.functional as F
told = {{
    "before": before,
    "command": Path("/proc/self/cmdline").read_text().strip("\\0").split("\\0"),
    "forked": b"/starter\\0" in Path("/proc/self/environ").read_bytes(),
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
    "random": [random.random(), numpy.random.random(), torch.initial_seed(), torch.rand(()).item()],
    "threads": torch.get_num_threads(),
    "found": torch.__spec__.origin == torch.__file__ and torch.__loader__ is torch.__spec__.loader,
    "arguments": sys.argv,
    "open": len(os.listdir("/proc/self/fd")),
    "variables": [os.environ["RANK"], os.environ["WORLD_SIZE"], "PACELINE_PARENT" in os.environ],
}}
print(json.dumps({{"told": told}}))
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters()), lambda model, x: F.mse_loss(model(x), x[:, :1]))
for batch in trainer.batches(x, batch_size=16, epochs={epochs}, seed=0):
    trainer.step(batch)
    Path("stepped").touch()
    while not Path("go").exists() and {waits}: pass
print(json.dumps({{"weight": model.weight.tolist(), "trained": trainer.steps}}))
"""


def look(first: str = "", *, epochs: int = 1, waits: bool = False) -> str:
    return LOOK.format(first=first, epochs=epochs, waits=waits)


def is_forked(run: Run, replica: int) -> bool:
    return bool(run.told("told", replica)["forked"])


@pytest.fixture(scope="module", autouse=True)
def _cold() -> Iterator[None]:
    """These runs make their own starters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TESTS_COLD", "1")
        yield


@pytest.fixture(scope="module")
def forked(start: Start) -> Run:
    return start(look(), "--replicas 2 --servers 1", "--of its own").fine()


def test_a_script_finds_what_it_would_find_in_a_new_python(forked: Run, start: Start) -> None:
    cold = start(look("# 'OMP_PLACES'"), "--replicas 2 --servers 1", "--of its own").fine()
    for replica in range(2):
        assert (is_forked(forked, replica), is_forked(cold, replica)) == (True, False)
        told, expected = forked.told("told", replica), cold.told("told", replica)
        assert not told["before"]
        assert told["found"]
        assert told["leads"]
        assert told["parent"] == forked.process.pid
        for name in ("command", "threads", "arguments", "variables", "open"):
            assert told[name] == expected[name], name
    assert forked.all_told("weight") == cold.all_told("weight")
    forked.assert_nothing_left()


def test_random_numbers_that_nobody_has_seeded_differ(forked: Run) -> None:
    first, second = (forked.told("told", replica)["random"] for replica in range(2))
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))


def test_what_a_module_sets_for_torch_before_it_is_imported_is_heard(start: Start, tmp_path: Path) -> None:
    text = "import os\nfor name in ('OMP', 'MKL'): os.environ[name + '_NUM_THREADS'] = '2'\nos.chdir('/')\n"
    (tmp_path / "its_settings.py").write_text(text)
    run = start(look("import its_settings"), "--replicas 2", folder=tmp_path).fine()
    for replica in range(2):
        assert not is_forked(run, replica)
        assert run.told("told", replica)["threads"] == 2  # a replica has one otherwise
    assert run.all_told("trained") == [4]


@pytest.mark.parametrize(
    ("text", "pays"),
    [
        ("import torch, os", True),
        ("def main():\n    import paceline as pl", True),
        ("from torch import nn", True),
        ("import torchvision", False),
        ("import os", False),
        ("os.environ['OMP_NUM_THREADS'] = '1'\nimport torch", False),
        ('os.environ.setdefault("TORCH_LOGS", "all")\nimport torch', False),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'\nimport torch", True),
        ("import torch\nTORCH_HOME = None", True),
        ("os.environ['KMP_DUPLICATE_LIB_OK'] = 'True'\nimport torch", True),
    ],
)
def test_scripts_that_load_torch_and_set_nothing_for_it_are_forked(text: str, pays: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    assert pays_for(str(tmp_path / "train.py")) is pays


def test_a_run_goes_on_without_its_starter(start: Start) -> None:
    run = start(look(epochs=2, waits=True), "--replicas 2 --on-failure restart")
    end = time.monotonic() + 60
    while not (run.folder / "stepped").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    members = {entry["pid"] for entry in run.events if entry["event"] == "started"}
    (starter,) = (
        child
        for child in psutil.Process(run.process.pid).children()
        if "starter_process" in str(child.cmdline()) and child.pid not in members
    )
    starter.kill()
    os.kill(max(members), signal.SIGKILL)
    while not run.count("restarted"):
        assert time.monotonic() < end
        time.sleep(0.01)
    (run.folder / "go").touch()
    run.fine()
    assert run.all_told("trained") == [8]
    assert run.count("restarted") == 1
    run.assert_nothing_left()
