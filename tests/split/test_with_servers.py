"""A cut model times replicas whose parameters live on servers. That its steps are exact is in `tests/contract`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, Start
from safetensors.torch import load_file
from with_servers import BATCH_SIZE, EPOCHS, PATH, SAMPLES, images, measures, network

from paceline.cli import main

SCRIPT = Path(__file__).with_name("with_servers.py")
STEPS = EPOCHS * SAMPLES // BATCH_SIZE


def everything(run: Run, replica: int = 0) -> dict[str, Any]:
    (said,) = run.said(replica)
    return said


def test_one_replica_of_two_tiles_is_one_process_statistics_included(start: Start) -> None:
    alone = start(SCRIPT, None).fine()
    tiles = start(SCRIPT, "--tiles 2 --servers 1").fine()
    expected = everything(alone)
    for device in range(2):
        told = everything(tiles, device)
        assert told["ledger"] == expected["ledger"]
        assert (told["steps"], told["lr"]) == (expected["steps"], expected["lr"]) == (STEPS, 0.05 / 8)
        assert told["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert told["before"] == pytest.approx(expected["before"], rel=1e-4)
        assert told["after"] == pytest.approx(expected["after"], rel=1e-4)
    saved, own = load_file(tiles.folder / PATH), load_file(alone.folder / PATH)
    assert saved.keys() == own.keys()
    for name, value in own.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.soak
@pytest.mark.parametrize("flags", ["--tiles 2 --replicas 2 --async", "--stages 2 --replicas 2 --accept 1"])
def test_devices_agree_and_what_is_saved_is_what_was_evaluated(flags: str, start: Start) -> None:
    run = start(SCRIPT, f"{flags} --servers 1").fine()
    by_device = [everything(run, process) for process in range(4)]
    for leader, follower in (by_device[:2], by_device[2:]):
        assert leader == follower  # also each loss: all devices of a replica are told
    for told in by_device:
        assert told["ledger"] == f"epochs 0 to {EPOCHS - 1}: {SAMPLES} samples, each once"
        assert told["after"] == by_device[0]["after"]
        assert told["after"]["accuracy"] > 0.9
        assert told["after"]["loss"] < told["before"]["loss"] / 2
    # Every step was some replica's; with spares a replica may be late with more.
    assert len(by_device[0]["losses"]) + len(by_device[2]["losses"]) >= STEPS
    model = network()
    model.load_state_dict(load_file(run.folder / PATH), strict=True)
    with torch.no_grad():
        found = measures(model.eval(), images())
    assert found == pytest.approx(by_device[0]["after"], rel=1e-4)
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--servers 1 --in-graph", "in-graph is 'set': devices of a cut model are processes"),
        ("--servers 1 --only sparse", "only is 'sparse': a cut model has no tables on servers so far"),
        ("--servers 1 --on-failure continue", "on-failure is 'continue': a cut model needs all its devices"),
    ],
)
def test_what_does_not_go_together_is_said(flags: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(SCRIPT), "--tiles", "2", "--replicas", "2", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err
