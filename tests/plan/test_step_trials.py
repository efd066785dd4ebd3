"""Steps that a profile makes for real, in forks of the script's process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.plan.calibration import Calibration
from paceline.plan.cluster import Cluster
from paceline.plan.kept_profiles import profile_script
from paceline.plan.predict import StepPredictor
from paceline.profile.trials import worth_trying
from paceline.profile.values import Profile, StepTrial, Timing
from paceline.rules import Async
from paceline.split.values import Stages
from paceline.strategy import Centralized, Mirrored
from tests.plan.made_up import profile

CORES = 2  # that the profile is told to use

SCRIPT = """
import os, sys
import torch
from torch import nn
import paceline as pl

first = os.getpid()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, i):
        return torch.full((8,), float(i)), torch.tensor([1.0])

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Rows()[i] for i in range(256))

def loss(model, batch):
    if sys.argv[1] == "fails in forks" and os.getpid() != first:
        raise ValueError("not here")
    x, y = batch
    if sys.argv[1] == "fails later" and x[0, 0] != 0:
        raise ValueError("not with another batch than the first")
    return (model(x) - y).square().mean()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters()), loss)
data = Stream() if sys.argv[1] == "stream" else Rows()
for batch in trainer.batches(data, 16, shuffle=False):
    trainer.step(batch)
print("trained to the end")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trials") / "train.py"
    path.write_text(SCRIPT)
    return path


def profiled(script: Path, what: str) -> Profile:
    return profile_script(str(script), [what], CORES, [CORES], budget_s=60.0)  # of a busy machine too


def test_replicas_servers_and_stages_are_tried_on_the_scripts_own_data_and_nothing_is_left(
    script: Path,
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    found = profiled(script, "map-style")
    tried = {tuple(trial.strategy.flags()): trial for trial in found.trials}
    for strategy in (
        Mirrored(),
        Mirrored(replicas=2),
        Mirrored(replicas=4),
        Centralized(replicas=2),
        Centralized(replicas=2, rule=Async()),
    ):
        trial = tried[tuple(strategy.flags())]
        assert 0 < trial.timing.low <= trial.timing.seconds <= trial.timing.high
        assert 0 < trial.computed_s <= trial.timing.seconds
    assert any(trial.strategy.split == Stages(stages=2, micro_batches=8) for trial in found.trials)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]


def test_a_stream_is_planned_by_its_shares_alone(script: Path) -> None:
    assert profiled(script, "stream").trials == ()


def test_a_script_that_fails_in_forks_is_planned_all_the_same(script: Path) -> None:
    began = time.monotonic()
    found = profiled(script, "fails in forks")
    assert {trial.strategy.processes for trial in found.trials} == {1}  # that which needs no fork
    assert time.monotonic() - began < 60
    assert found.shares


def test_a_script_that_fails_in_a_later_step_is_planned_by_its_shares_alone(script: Path) -> None:
    found = profiled(script, "fails later")
    assert found.trials == ()
    assert found.shares


def test_forks_end_with_the_process_that_tries(script: Path) -> None:
    """Killed, it can end nobody itself."""
    code = (
        "import sys; from paceline.plan.kept_profiles import profile_script;"
        f"profile_script(sys.argv[1], ['tensors'], {CORES}, [], budget_s=60.0)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(script)], stderr=subprocess.DEVNULL) as started:

        def at_it() -> list[psutil.Process]:
            """Returns the script's process and its forks, while there are some."""
            found = []
            for process in psutil.Process(started.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    found += [process] if str(script) in process.cmdline() else []
            return found if len(found) > 2 else []

        try:
            end = time.monotonic() + 60.0
            while not (processes := at_it()):
                assert time.monotonic() < end
                time.sleep(0.005)
            first = min(processes, key=lambda process: process.create_time())
            first.kill()
            assert not psutil.wait_procs(processes, timeout=20)[1]
        finally:
            started.kill()


def test_what_was_tried_is_predicted_on_this_machine_and_on_no_other() -> None:
    trial = StepTrial(strategy=Mirrored(replicas=2), timing=Timing(0.02, 0.019, 0.023), computed_s=0.015)
    known = profile(trials=(trial,))
    calibration = Calibration(
        machine="made up", made="", cores=2, memory_bytes=1 << 34, memory_bandwidth=1e10, memory_bandwidth_all=1e10,
        neighbour_compute=1.0, neighbour_memory=1.0, mailbox_s=1e-5,
    )  # fmt: skip
    here = StepPredictor(known, calibration, Cluster(hosts=1, cores=2, memory_bytes=1 << 34)).mirrored(2)
    assert here.step.seconds == trial.timing.seconds
    assert sum(part.seconds for part in here.parts) == pytest.approx(trial.timing.seconds)
    assert {part.name: part.seconds for part in here.parts}["compute"] == pytest.approx(trial.computed_s)
    larger = StepPredictor(known, calibration, Cluster(hosts=1, cores=4, memory_bytes=1 << 34)).mirrored(2)
    assert larger.step.seconds != trial.timing.seconds
    several = Cluster(hosts=2, cores=2, link="1gbit", memory_bytes=1 << 34)
    assert StepPredictor(known, calibration, several).mirrored(2, 1).step.seconds != trial.timing.seconds


def test_nothing_is_tried_with_fewer_samples_than_replicas() -> None:
    assert all(strategy.replicas <= 3 for strategy in worth_trying(2, 3))
    assert worth_trying(64, 1000) == []  # too many processes
