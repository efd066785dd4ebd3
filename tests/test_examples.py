"""The examples do what their first lines say: the same result from one process and from two replicas."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TESTS, Run, Start
from safetensors.torch import load_file

EXAMPLES = TESTS.parent / "examples"
# digits.py is what the demo trains.
QUICK = {
    "zen.py": ("--epochs 1", r"loss \d\.\d+ after 13 updates\n"),
    "existing_loop.py": ("--epochs 5", r"accuracy 0\.[89]\d+ after 5 epochs\n"),
    "conv_batchnorm.py": (
        "--epochs 2 --save net.safetensors",
        r"(epoch \d: test loss [\d.]+, accuracy 0\.9\d+\n){2}epochs 0 to 1: 1500 samples, each once\n",
    ),
}


@pytest.fixture(scope="module")
def runs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Run]]:
    """Of one example: one process, plain `python`, and two replicas."""

    @functools.cache
    def both(name: str) -> tuple[Run, Run]:
        arguments = QUICK[name][0]
        alone = Run(tmp_path_factory.mktemp("alone"), sys.executable, str(EXAMPLES / name), *arguments.split())
        replicas = start(EXAMPLES / name, "--replicas 2", arguments)
        return alone.fine(), replicas.fine()

    return both


@pytest.mark.parametrize("name", QUICK)
def test_two_replicas_print_what_one_process_prints(name: str, runs: Callable[[str], tuple[Run, Run]]) -> None:
    alone, replicas = runs(name)
    assert re.fullmatch(QUICK[name][1], alone.out), alone.out
    assert replicas.out == alone.out


def test_a_finished_training_that_is_started_again_repeats_its_results_and_trains_nothing(
    start: Start, runs: Callable[[str], tuple[Run, Run]]
) -> None:
    name = "conv_batchnorm.py"
    _, first = runs(name)
    before = load_file(first.folder / "net.safetensors")
    again = start(EXAMPLES / name, None, QUICK[name][0], folder=first.folder).fine()
    assert again.out == first.out
    after = load_file(first.folder / "net.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before.keys() | after.keys())


def test_the_demo_kills_a_replica_and_the_results_agree(tmp_path: Path) -> None:
    demo = Run(tmp_path, sys.executable, str(EXAMPLES / "demo.py"), "--quick").end()
    assert demo.code == 0, demo.out + demo.err
    assert "replica 1 was killed by SIGKILL at step" in demo.out
    assert demo.out.endswith("All results agree.\n")
    assert not list(tmp_path.iterdir())
