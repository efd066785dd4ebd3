"""What is measured for plans, in real processes: exchanges, neighbours, devices of a cut one by one."""

from __future__ import annotations

import os
import time

import psutil
import pytest
import torch
from torch import nn

from paceline.errors import LaunchError
from paceline.loop.returned_loss import read_loss
from paceline.plan.calibrate import run_points
from paceline.profile.layers import layer_times
from paceline.profile.neighbours import busy_neighbours
from paceline.profile.optimizer_times import update_time
from paceline.profile.other_load import LoadOfOthers
from paceline.profile.step_times import StepWork, kept_bytes, share_times
from paceline.profile.virtual_devices import try_cut
from paceline.split.values import Layout, Stages, Tiles

CORES = sorted(os.sched_getaffinity(0))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def work(model: nn.Module, batch: torch.Tensor) -> StepWork:
    return StepWork(loss, model, batch, lambda returned: read_loss(returned, "in a test"))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def test_an_exchange_is_measured_by_runs_and_a_failing_one_says_why() -> None:
    points = run_points(("--replicas", "2"), 8, norms=False, few=True)
    assert [point.bytes for point in points] == sorted(point.bytes for point in points)
    assert all(0 < point.low <= point.seconds <= point.high for point in points)
    with pytest.raises(LaunchError, match=r"calibrating with `--replicas 0` failed: .*replicas is '0'"):
        run_points(("--replicas", "0"), 4, norms=False)


def test_a_profile_leaves_the_model_and_its_optimizer_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = work(model, torch.randn(16, 8))
    shares = share_times(given, CORES, time.monotonic() + 40.0)
    layers = layer_times(given)
    update_time(optimizer, 0.1)
    kept_bytes(given)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert max(share.samples for share in shares) == 16
    assert min(share.samples for share in shares) > 1  # BatchNorm takes no fewer
    assert layers.arrivals[-1][1] == pytest.approx(1.0)
    assert [layer.kind for layer in layers.layers if layer.parameters] == ["Linear", "BatchNorm1d", "Linear"]


@pytest.mark.parametrize(
    "split", [Stages(stages=2, micro_batches=4), Layout(mesh={"model": 2}, layout={"hidden": "model"})]
)
def test_the_devices_of_a_cut_compute_what_the_whole_does_and_no_device_works_longer_than_the_step(
    split: Stages | Layout, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    found = try_cut(work(mlp(), torch.randn(16, 64)), split, 16, {}, 50e-6, CORES, time.monotonic() + 1.0)
    assert found.why_not is None
    assert found.timing is not None
    assert 0 < found.busiest_s <= found.timing.high
    assert found.messages >= 1
    assert 0 < found.parameter_bytes <= sum(parameter.nbytes for parameter in mlp().parameters())


def test_a_cut_that_a_model_does_not_allow_says_why() -> None:
    found = try_cut(work(mlp(), torch.randn(16, 64)), Tiles(rows=2), 16, {}, 50e-6, CORES, time.monotonic())
    assert found.timing is None
    assert found.why_not


def test_neighbours_are_busy_inside_and_gone_afterwards() -> None:
    def work_a_little() -> None:
        until = time.process_time() + 0.01
        while time.process_time() < until:
            pass

    load, before = LoadOfOthers(), set(psutil.Process().children())
    with busy_neighbours(work_a_little, CORES[:1]):
        (neighbour,) = set(psutil.Process().children()) - before
        while sum(neighbour.cpu_times()[:2]) < 0.3:
            time.sleep(0.01)
        inside = load.cores()
    assert inside > 0  # children that run are not this process's own yet
    assert set(psutil.Process().children()) <= before
