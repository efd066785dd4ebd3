"""Predictors in one plain process, case by case; what came of each is a line of JSON, which the tests look at.

A cut of its own, the simplest there is, shows the mechanism; the real ones are asked whether they serve.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import paceline as pl
from paceline.errors import CheckpointError, ModelError, PacelineError, ReplicaDied, StrategyError
from paceline.exchange.mailboxes import Peers
from paceline.serve import device
from paceline.split.collectives import bounds
from paceline.split.cut import Cut, Function, TensorPart
from paceline.split.values import Split

CASES: dict[str, Callable[[], None]] = {}


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


# ── the simplest cut ─────────────────────────────────────────────────────────────────────────────────────────


class Rows(nn.Module):
    """A linear layer that any number of devices can divide by its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 7)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, more: Any = None) -> torch.Tensor:
        self.calls += 1
        y = nn.functional.linear(x, self.linear.weight, self.linear.bias) * scale
        return y if more is None else y + more["shift"][0]


class RowsCut(Cut):
    """Numbers that are never in a request else say what is to go wrong, and on which device."""

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        if given[0][0].size(0) > 100:
            raise ModelError("model", "Rows", "it takes 100 samples at once")
        own = bounds(7, self.peers.count)[self.peers.rank : self.peers.rank + 2]
        self._part = TensorPart((slice(*own),))
        forward, self._model = model.forward, model

        def cut(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if x.flatten()[0] == 666 + self.peers.rank:
                raise ValueError("the number of the beast")
            if x.flatten()[0] == 777 and self.peers.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            more = kwargs.pop("more", None)
            y = self.peers.everyone.all_gather(forward(x, **kwargs), -1)
            return y if more is None else y + more["shift"][0]

        model.forward = cut  # type: ignore[method-assign]

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            tensor.data = tensors[name]

    def part_of(self, name: str) -> TensorPart:
        return self._part if name.startswith("linear") else TensorPart()


def rows(devices: int = 2) -> pl.Tiles:
    return pl.Tiles(rows=devices)


real = device.open_cut


def open_cut(split: Split, peers: Peers, dims: Mapping[str, str]) -> Cut:
    return RowsCut(peers) if isinstance(split, pl.Tiles) else real(split, peers, dims)


def others() -> list[psutil.Process]:
    return psutil.Process().children()


def sentence(error: pytest.ExceptionInfo[Any]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────


@case
def answers_are_those_of_the_model() -> None:
    plain = Rows()
    for devices in (1, 2, 3):
        with pl.load(None, Rows(), split=rows(devices)) as predictor:
            assert len(others()) == devices - 1
            for batch in (4, 1, 9):
                x = torch.randn(batch, 6)
                torch.testing.assert_close(predictor(x), plain(x).detach())
                assert not predictor(x).requires_grad
            torch.testing.assert_close(predictor(x.t().contiguous().t(), scale=0.5), plain(x, scale=0.5).detach())
            more = {"shift": [torch.ones(7), None, ("text", 3)]}
            torch.testing.assert_close(predictor(x, more=more), plain(x, more=more).detach())
        assert not others()


@case
def the_callers_process_stays_as_it_was() -> None:
    gc.collect()  # what earlier cases have left
    torch.set_num_threads(2)
    cores = os.sched_getaffinity(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pl.load(None, Rows(), split=rows()) as predictor:
        predictor(torch.ones(2, 6))
        assert os.sched_getaffinity(0) == cores
        assert torch.get_num_threads() == 2
    del predictor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    torch.set_num_threads(1)


@case
def a_model_that_is_not_cut_is_in_eval_mode_during_requests_only() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.BatchNorm1d(6))
    model[1].eval()
    before, x = [module.training for module in model.modules()], torch.randn(4, 6)
    with pl.load(None, model) as predictor:
        for _ in range(2):
            answer = predictor(x)
            assert [module.training for module in model.modules()] == before
    torch.testing.assert_close(answer, model.eval()(x).detach())


@case
def a_large_request_takes_the_way_in_pieces() -> None:
    plain = Rows()
    with pl.load(None, Rows(), split=rows()) as predictor:
        predictor(torch.ones(1, 6))
        x = torch.randn(3_000_000, 6)  # 72 MB: more than a mailbox holds
        torch.testing.assert_close(predictor(x), plain(x).detach())


@case
def threads_may_share_a_predictor() -> None:
    plain = Rows()
    wrong: list[str] = []
    with pl.load(None, Rows(), split=rows()) as predictor:

        def ask(number: int) -> None:
            x = torch.full((2, 6), float(number))
            for _ in range(20):
                if not torch.allclose(predictor(x), plain(x).detach(), atol=1e-5):
                    wrong.append(f"thread {number}")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 11), nn.Linear(11, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stack, self.project = nn.LSTM(6, 6, 3, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.stack(x)[0])


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def serves(make: Callable[[], nn.Module], split: Split, *shape: int, dims: Mapping[str, str] | None = None) -> None:
    plain = make().eval()
    with pl.load(None, make(), split=split, dims=dims) as predictor:
        for batch in (4, 1):
            x = torch.randn(batch, *shape)
            torch.testing.assert_close(predictor(x), plain(x).detach())


@case
def a_layout_serves() -> None:
    layout = pl.Layout(mesh={"model": 2}, layout={"middle": "model"})
    serves(Mlp, layout, 6, dims={"fc1.weight": "middle inputs"})


@case
def stages_serve() -> None:
    serves(Mlp, pl.Stages(stages=2), 6)


@case
def a_wavefront_serves() -> None:
    serves(Recurrent, pl.Wavefront(parts=2, time_block=4), 10, 6)


@case
def tiles_serve() -> None:
    device.open_cut = real
    try:
        serves(Conv, pl.Tiles(rows=2), 3, 9, 8)
    finally:
        device.open_cut = open_cut


@case
def a_trainer_predicts_in_one_process() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Dropout(0.5))
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b).mean())
    x = torch.randn(3, 6)
    answer = trainer.predictor()(x)
    torch.testing.assert_close(answer, model[0](x).detach())
    assert model.training
    assert not answer.requires_grad


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@case
def a_file_fills_the_model() -> None:
    trained = Rows()
    with torch.no_grad():
        trained.linear.weight.mul_(2)
    trainer = pl.Trainer(trained, torch.optim.SGD(trained.parameters(), 0.1), lambda m, b: m(b).mean())
    trainer.save("saved.safetensors")
    save_file(trained.state_dict(), "plain.safetensors")
    for training_file in Path().glob("saved.*.training.safetensors"):
        training_file.unlink()  # a server of predictions need not have it
    x = torch.randn(3, 6)
    for name in ("saved.safetensors", "plain.safetensors"):
        with pl.load(name, Rows(), split=rows()) as predictor:
            torch.testing.assert_close(predictor(x), trained(x).detach())
    with pytest.raises(CheckpointError) as error:
        pl.load("plain.safetensors", Mlp(), split=rows())
    assert "plain.safetensors has no tensor 'fc1.bias'" in sentence(error)
    save_file({**trained.state_dict(), "linear.bias": torch.ones(8)}, "other.safetensors")
    with pytest.raises(CheckpointError) as error:
        pl.load("other.safetensors", Rows(), split=rows())
    assert "'linear.bias' of shape [8], and the model of [7]" in sentence(error)
    with pytest.raises(CheckpointError):
        pl.load("nowhere.safetensors", Rows())
    assert not others()


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────


@case
def a_request_that_fails_is_not_the_end() -> None:
    plain, x = Rows(), torch.randn(3, 6)
    with pl.load(None, Rows(), split=rows()) as predictor:
        predictor(x)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"mat1 and mat2|must match"):  # all devices
                predictor(torch.ones(2, 5))
            torch.testing.assert_close(predictor(x), plain(x).detach())
            with pytest.raises(ValueError, match="the number of the beast"):  # the caller alone
                predictor(torch.full((1, 6), 666.0))
            torch.testing.assert_close(predictor(x), plain(x).detach())
            with pytest.raises(PacelineError) as error:  # the other one alone
                predictor(torch.full((1, 6), 667.0))
            assert sentence(error) == "device 1 failed: ValueError: the number of the beast"
            torch.testing.assert_close(predictor(x), plain(x).detach())
        with pytest.raises(PacelineError) as error:
            predictor(object())
        assert "a request has a object: it may be made of tensors" in sentence(error)
        torch.testing.assert_close(predictor(x), plain(x).detach())


@case
def failures_at_random_are_cleared_away() -> None:
    plain, x, random = Rows(), torch.randn(3, 6), Random(0)
    with pl.load(None, Rows(), split=rows(3), timeout_s=30) as predictor:
        predictor(x)
        for _ in range(300):
            which = random.choice(["all", 0, 1, 2, None, None])
            if which is None:
                torch.testing.assert_close(predictor(x), plain(x).detach())
                continue
            bad = torch.ones(2, 5) if which == "all" else torch.full((random.choice([1, 3000]), 6), 666.0 + which)
            with pytest.raises((RuntimeError, ValueError, PacelineError), match=r"beast|mat1"):
                predictor(bad)


@case
def a_model_that_cannot_be_cut_is_one_sentence() -> None:
    predictor = pl.load(None, Rows(), split=rows())
    with pytest.raises(ModelError) as error:
        predictor(torch.ones(101, 6))
    assert sentence(error) == "model is 'Rows': it takes 100 samples at once"
    with pytest.raises(ReplicaDied) as ended:
        predictor(torch.ones(1, 6))
    assert "load the model again" in sentence(ended)
    assert not others()


@case
def a_killed_device_is_one_sentence() -> None:
    predictor = pl.load(None, Rows(), split=rows())
    predictor(torch.ones(1, 6))
    began = time.monotonic()
    with pytest.raises(ReplicaDied) as error:
        predictor(torch.full((1, 6), 777.0))  # in the middle
    assert "the process of device 1 has ended" in sentence(error)
    with pytest.raises(ReplicaDied):
        predictor(torch.ones(1, 6))
    predictor = pl.load(None, Rows(), split=rows(3))
    predictor(torch.ones(1, 6))
    others()[1].kill()  # between requests
    with pytest.raises(ReplicaDied) as error:
        predictor(torch.ones(1, 6))
    assert "has ended" in sentence(error)
    assert time.monotonic() - began < 30  # and not the time limit of 60 s
    assert not others()


@case
def a_process_that_was_forked_has_no_predictor() -> None:
    with pl.load(None, Rows(), split=rows()) as predictor:
        predictor(torch.ones(1, 6))
        if not (child := os.fork()):
            try:
                predictor(torch.ones(1, 6))
            except PacelineError as error:
                os._exit(0 if "belongs to the process that loaded it" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        predictor(torch.ones(1, 6))


@case
def bad_input_is_one_sentence() -> None:
    with pytest.raises(StrategyError) as error:
        pl.load(None, Rows(), split=rows(1000))
    assert "needs 1000 devices" in sentence(error)
    mesh = pl.Layout(mesh={"data": 2, "model": 2}, layout={"batch": "data", "hidden": "model"})
    with pytest.raises(StrategyError) as error:
        pl.load(None, Rows(), split=mesh)
    assert "give no axis to the batch" in sentence(error)
    with pytest.raises(StrategyError, match="timeout_s is 0"):
        pl.load(None, Rows(), split=rows(), timeout_s=0)
    with pytest.raises(ModelError, match="meta"):
        pl.load(None, Rows().to("meta"), split=rows())


def main() -> None:
    device.open_cut = open_cut
    torch.set_num_threads(1)
    for name, run in CASES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        wrong = None
        try:
            run()
        except BaseException:
            wrong = traceback.format_exc()
        print(json.dumps({"case": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
