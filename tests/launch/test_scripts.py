"""What a script finds around it under `paceline run`: torchrun's variables, a terminal, its own name."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OWN_GROUP = """
import json, os, torch
import torch.distributed as dist

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(json.dumps({"sum": total.item(), "place": [os.environ[name] for name in names]}))
dist.destroy_process_group()
"""


def test_a_script_that_makes_a_process_group_of_its_own_finds_what_torchrun_would_tell(
    start: Callable[..., Any],
) -> None:
    run = start(OWN_GROUP, "--replicas 2").fine()
    assert [run.told("sum", replica) for replica in range(2)] == [3.0, 3.0]
    assert [run.told("place", replica) for replica in range(2)] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]
    assert "paceline: the script never used Paceline: it ran 2 times, each process for itself" in run.err


def test_one_process_that_never_uses_paceline_is_not_spoken_to(start: Callable[..., Any]) -> None:
    assert start("print(1)").fine().err == ""


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "import paceline as pl, torch\nmodel = torch.nn.Linear(1, 1)\n"
            "pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))\nimport time; time.sleep(60)",
            "paceline: paceline verify compares the steps of a pl.Trainer, and this script uses pl.distribute\n",
        ),
        (
            "print('trains nothing')",
            "paceline: train.py made no step with a pl.Trainer, whose numbers paceline verify compares\n",
        ),
    ],
    ids=["distribute", "nothing"],
)
def test_verify_says_at_once_that_it_needs_a_trainer(script: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "verify", "train.py", "--replicas", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=45, check=False)
    assert (done.returncode, done.stderr) == (2, sentence)


def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("FACTOR = 3\n")
    (tmp_path / "package" / "train.py").write_text(
        "import json, sys\nfrom . import FACTOR\nprint(json.dumps([__name__, FACTOR, sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "-m", "package.train", "--quiet", "--", "--lr", "0.1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=45, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["__main__", 3, ["--lr", "0.1"]]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-train")
    command[5] = "pakage.train"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=45, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "paceline: script is 'pakage.train': there is no module pakage, give one as to python -m\n",
    )


def test_a_breakpoint_works_in_one_replica_with_the_live_table_on_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("secret = 41\nbreakpoint()\nprint('went on with', secret)\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "train.py"],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 4096)

    try:
        until(b"(Pdb) ")
        os.write(ours, b"secret + 1\n")
        until(b"42")
        os.write(ours, b"secret = 7\n")
        os.write(ours, b"continue\n")
        until(b"went on with 7")
        until(b"run folder")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


RESUMED = """
import sys
import torch
import paceline as pl

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean())
trainer.resume("last.safetensors")
for batch in trainer.batches(torch.arange(40.0).view(40, 1) / 40, 4, epochs=int(sys.argv[1])):
    trainer.step(batch)
trainer.save("last.safetensors")
"""


def test_a_resumed_run_counts_its_own_steps(start: Callable[..., Any], tmp_path: Path) -> None:
    def ended(epochs: int, flags: str) -> tuple[int, int]:
        start(RESUMED, f"--run-folder {epochs} {flags}", str(epochs), folder=tmp_path).fine()
        last = json.loads((tmp_path / str(epochs) / "events.jsonl").read_text().splitlines()[-1])
        return last["resumed_at"], last["steps"]

    assert ended(1, "--replicas 2") == (0, 10)
    assert ended(2, "--replicas 2") == (10, 20)
    assert ended(3, "--servers 1") == (20, 30)


BY_EPOCH = """
import json
import torch
import paceline as pl
from paceline.exchange.board import Board
from paceline.exchange.words import HostWord

board = Board(pl.place().board)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean())
totals = []
for epoch in range(3):
    for batch in trainer.batches(torch.arange(10.0).view(10, 1) / 10, 4):
        trainer.step(batch)
        totals.append(board.host_get(HostWord.TOTAL_STEPS))
print(json.dumps({"totals": totals}))
"""


@pytest.mark.parametrize("flags", ["--replicas 2", "--servers 1"])
def test_a_loop_by_epoch_has_a_total(start: Callable[..., Any], flags: str) -> None:
    """It is what the display divides by: the steps of the run, up to the end of the epoch."""
    assert start(BY_EPOCH, flags).fine().told("totals") == [3] * 3 + [6] * 3 + [9] * 3
