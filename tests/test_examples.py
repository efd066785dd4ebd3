"""The examples do what their first lines say: the same result from one process and from two replicas."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import TESTS, Run, Start

EXAMPLES = TESTS.parent / "examples"
QUICK = {
    "digits.py": ("--epochs 3", r"accuracy 0\.9\d+ after 45 updates\n"),
    "existing_loop.py": ("--epochs 5", r"accuracy 0\.[89]\d+ after 5 epochs\n"),
    "conv_batchnorm.py": (
        "--epochs 2",
        r"(epoch \d: test loss [\d.]+, accuracy 0\.9\d+\n){2}epochs 0 to 1: 1500 samples, each once\n",
    ),
}


@pytest.mark.parametrize("name", QUICK)
def test_two_replicas_print_what_one_process_prints(name: str, start: Start) -> None:
    arguments, expected = QUICK[name]
    runs = [start(EXAMPLES / name, flags, arguments) for flags in (None, "--replicas 2")]
    alone, replicas = (run.fine().out for run in runs)
    assert re.fullmatch(expected, alone), alone
    assert replicas == alone


def test_a_finished_training_that_is_started_again_repeats_its_results_and_trains_nothing(
    start: Start, tmp_path: Path
) -> None:
    """With another number of replicas, too: results come from the record, and no step is taken."""
    save = tmp_path / "net.safetensors"
    arguments = f"--epochs 2 --save {save}"
    first = start(EXAMPLES / "conv_batchnorm.py", None, arguments).fine()
    before = save.read_bytes()
    again = start(EXAMPLES / "conv_batchnorm.py", "--replicas 2", arguments).fine()
    assert again.out == first.out
    assert save.read_bytes() == before
    assert again.count("step") == 0


def test_the_demo_survives_its_own_kill_and_agrees(tmp_path: Path) -> None:
    demo = Run(tmp_path, sys.executable, str(EXAMPLES / "demo.py"), "--quick").end()
    assert demo.code == 0, demo.out + demo.err
    assert "replica 1 was killed by SIGKILL at step" in demo.out
    assert demo.out.endswith("All results agree.\n")
    assert not list(tmp_path.iterdir())


def test_the_demo_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    demo = Run(tmp_path, sys.executable, str(EXAMPLES / "demo.py"), "--quik").end()
    assert demo.code == 2
    assert "unrecognized arguments: --quik" in demo.err
