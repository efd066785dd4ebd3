"""A replica that ends before it has come to the servers is not waited for, and a wait says what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Start

from paceline.exchange.board import Board
from paceline.exchange.words import Phase
from paceline.launch.job import RunJob
from paceline.launch.regular_look import RegularLook
from paceline.launch.reporter import Reporter
from paceline.run_place import Place
from paceline.watch.display import PlainDisplay
from paceline.watch.run_folder import RunFolder

SCRIPT = """
import json, sys, torch, paceline as pl
from torch import nn

place = pl.place()
if str(place.rank) in sys.argv[1:]:
    sys.exit(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
for batch in trainer.batches(torch.randn(32, 4), 8):
    trainer.step(batch)
print(json.dumps({"proof": trainer.ledger.check()}))
"""


@pytest.mark.parametrize(
    ("flags", "ends", "left"),
    [
        ("--replicas 2 --servers 1", "1", 0),
        pytest.param("--replicas 2 --servers 1 --stages 2", "2 3", 0, marks=pytest.mark.soak),
        ("--replicas 2 --servers 1 --stages 2", "0 1", 2),
    ],
    ids=["a replica", "all devices of a cut one", "all devices of the first, who make what all use"],
)
def test_who_ends_before_it_has_joined_is_not_waited_for(flags: str, ends: str, left: int, start: Start) -> None:
    run = start(SCRIPT, f"{flags} --timeout 60", ends).fine(timeout_s=50)
    assert run.told("proof", left) == "epoch 0: 32 samples, each once"
    run.assert_nothing_left()


def test_a_stall_in_which_all_replicas_wait_names_the_servers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    board = Board.create(2, supervised=True)
    board.enter(0, Phase.AWAITING_SERVERS)
    board.enter(1, Phase.AWAITING_WORK)
    job = RunJob("train.py", (), Place(row=0, rows=2), server_hosts=(0,), stall_s=0.0)
    display = PlainDisplay()
    RegularLook(job, Reporter(job, RunFolder(tmp_path, print), display)).for_stalls(board, {0: None, 1: None})  # type: ignore[dict-item]
    display.close()
    assert capfd.readouterr().err.endswith("; waited for: the servers\n")
