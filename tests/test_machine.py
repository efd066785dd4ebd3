"""What the machine has decides before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Start

from paceline.cli import main
from paceline.cli.checks import REPLICA_BYTES, check_memory
from paceline.errors import LaunchError, StrategyError
from paceline.machine import free_memory
from paceline.split.cut import open_cut
from paceline.split.values import Stages


def test_more_replicas_than_fit_into_memory_are_refused_before_they_bring_it_down() -> None:
    too_many = 2 * free_memory() // REPLICA_BYTES
    with pytest.raises(StrategyError, match=rf"replicas is {too_many}: torch alone takes \d+ GiB .* give at most \d+"):
        check_memory(too_many)
    check_memory(1)


ELSEWHERE = """
import json, torch
import paceline as pl
import paceline.torch_backend

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 4)
trainer = pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean())
losses = [trainer.step(batch) for batch in trainer.batches(x, 8, epochs=2)]
refused = []
for attempt in (lambda: pl.distribute(model, optimizer), lambda: paceline.torch_backend.register()):
    try:
        attempt()
    except pl.PacelineError as error:
        refused.append(str(error))
print(json.dumps({"losses": losses, "refused": refused, "rendezvous": trainer._place.rendezvous}))
"""


def test_on_another_processor_replicas_use_collectives_and_what_needs_shared_words_is_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = start(ELSEWHERE, "--replicas 2").fine()
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'aarch64'\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    there = start(ELSEWHERE, "--replicas 2").fine()
    assert there.told("losses") == pytest.approx(here.told("losses"), rel=1e-5)
    assert (here.told("rendezvous"), here.told("refused")) == (None, [])
    assert there.told("rendezvous") is not None
    by_collectives = (
        "on this processor (aarch64): that relies on the memory order of x86-64; "
        "pl.Trainer with --replicas works here, by collectives"
    )
    assert there.told("refused") == [
        f"pl.distribute has no replicas {by_collectives}",
        f"the backend paceline cannot be used {by_collectives}",
    ]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(LaunchError, match=r"a model cannot be cut over devices on this processor \(aarch64\)"):
        open_cut(Stages(stages=2), None, {})  # type: ignore[arg-type]  # it does not come so far


@pytest.mark.parametrize("flags", ["--replicas 2 --exchange shared", "--stages 2"])
def test_on_another_processor_what_needs_shared_words_is_refused_before_anything_starts(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert main(["run", "train.py", *flags.split()]) == 2
    assert "on this processor (aarch64): that relies on the memory order of x86-64" in capsys.readouterr().err
    assert not Path("runs").exists()
