"""`Trainer(strategy=…)` is what was started, or a sentence that says how to start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json
import torch
import paceline as pl

X = torch.arange(8.0).view(8, 1)


def attempt(name, strategy):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        trainer = pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), strategy=strategy)
        steps = [trainer.step(batch) for batch in trainer.batches(X, 4)]
        told = f"{len(steps)} steps, {trainer.replicas} replicas, wire {trainer._place.strategy.wire}"
    except pl.PacelineError as error:
        told = str(error)
    print(json.dumps({name: told}), flush=True)


for name, strategy in {
    "one": pl.Mirrored(),
    "two": pl.Mirrored(replicas=2),
    "two, 30 s": pl.Mirrored(replicas=2, timeout_s=30),
    "two, 30 s, bf16": pl.Mirrored(replicas=2, timeout_s=30, wire="bf16"),
    "two, 30 s, local": pl.Mirrored(replicas=2, timeout_s=30, batchnorm="local"),
    "tables": pl.Mirrored(replicas=2, timeout_s=30, table_servers=1),
    "stages": pl.Mirrored(split=pl.Stages(stages=2)),
    "servers": pl.Centralized(replicas=2, servers=3, rule=pl.Async(bound=2), timeout_s=30),
}.items():
    attempt(name, strategy)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_a_strategy_that_needs_more_than_this_process_is_answered_with_the_command_that_starts_it(
    start: Callable[..., Any], script: Path
) -> None:
    run = start(Path("train.py"), None, "--lr 0.1", folder=script.parent).fine()
    start_it = "this is one process, start it with `paceline run train.py"
    assert run.told("one") == "2 steps, 1 replicas, wire fp32"
    assert run.told("two") == f"replicas is 2: {start_it} --replicas 2 -- --lr 0.1`"
    assert run.told("two, 30 s, bf16") == (
        f"replicas is 2: {start_it} --replicas 2 --wire bf16 --timeout 30 -- --lr 0.1`"
    )
    assert run.told("tables") == (
        f"servers is 1: {start_it} --replicas 2 --timeout 30 --only sparse --servers 1 -- --lr 0.1`"
    )
    assert run.told("stages") == (
        f"split is '2 stages, 1 micro-batches, 1f1b': {start_it} --replicas 1 --stages 2 --micro-batches 1 "
        "--schedule 1f1b -- --lr 0.1`"
    )
    assert run.told("servers") == (
        f"servers is 3: {start_it} --replicas 2 --timeout 30 --servers 3 --bounded 2 -- --lr 0.1`"
    )


def test_a_strategy_that_is_not_what_was_started_names_the_first_field_that_differs_and_its_flag(
    start: Callable[..., Any], script: Path
) -> None:
    run = start(Path("train.py"), "--replicas 2 --timeout 30", folder=script.parent).fine()
    for replica in range(2):
        assert run.told("two, 30 s", replica) == "2 steps, 2 replicas, wire fp32"
    assert run.told("one") == (
        "replicas is 1: this run was started with 2, start it with --replicas 1, without --timeout"
    )
    assert run.told("two") == "timeout is 600.0: this run was started with 30.0, start it without --timeout"
    assert run.told("two, 30 s, bf16") == "wire is 'bf16': this run was started with 'fp32', start it with --wire bf16"
    assert run.told("two, 30 s, local") == (
        "batchnorm is 'local': this run was started with 'exact', start it with --batchnorm local"
    )
    assert run.told("tables") == (
        "table_servers is 1: this run was started with None, start it with --only sparse, with --servers 1"
    )
    assert run.told("servers") == (
        "servers is 3: this run was started with None, start it with --servers 3, with --bounded 2"
    )


def test_under_torchrun_a_strategy_of_as_many_replicas_holds_and_any_other_is_refused(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert told.count('{"two, 30 s, bf16": "2 steps, 2 replicas, wire bf16"}') == 2
    assert told.count('{"one": "replicas is 1: torchrun has started 2, give it as many processes, or `') == 2
    assert told.count('{"servers": "servers is 3: torchrun starts replicas alone, start it with `paceline run ') == 2
