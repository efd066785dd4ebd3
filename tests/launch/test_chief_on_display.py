"""What is shown is what the chief prints, whoever that is at the moment; and a script may go to another folder."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

# Replica 0 kills itself at its fifth step, and is chief again when it takes part again.
SCRIPT = """
import json, os, signal, time
import torch
import paceline as pl
from paceline.exchange.board import Board
from paceline.exchange.words import Word

place = pl.place()
board = Board(place.board)
os.chdir("/")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, batch: model(batch).mean())
made = 0
for batch in trainer.batches(torch.randn(16, 4), batch_size=4, epochs=500):
    trainer.step(batch)
    time.sleep(0.02)
    made += 1
    if trainer.chief:
        print(json.dumps([board.get(place.row, Word.STEP), place.rank, place.restarted]))
    if made == 5 and place.rank == 0 and not place.restarted:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("flags", ["", "--servers 1 --durability log"])
def test_the_output_of_a_chief_that_was_started_again_is_shown(start: Callable[..., Any], flags: str) -> None:
    run = start(SCRIPT, f"--replicas 2 --on-failure restart --save-on-stop last.safetensors {flags}")
    shown: list[tuple[int, int, bool]] = []
    for line in run.process.stdout:
        shown.append(tuple(json.loads(line)))
        if flags and len(shown) == 3:
            (server,) = (event["pid"] for event in run.events if event["event"] == "server started")
            os.kill(server, signal.SIGTERM)
        if sum(again for _, _, again in shown) == 10:
            run.process.send_signal(signal.SIGINT)
            break
    run.end()
    assert run.code == 130, run.err
    speakers = [rank for _, rank, _ in shown]
    assert speakers[:5] == [0] * 5
    assert speakers[-10:] == [0] * 10
    assert (run.folder / "last.safetensors").exists(), "it was named before the script went elsewhere"
    if flags:
        assert "paceline: server 0 was killed by SIGTERM" in run.err
        assert "; it is started again (" in run.err
        assert run.count("server started") == 2
    else:
        steps = [step for step, _, _ in shown]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "nothing twice, nothing missing"
        assert 1 in speakers
