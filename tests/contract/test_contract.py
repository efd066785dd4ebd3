"""Strategies change speed, never results: every one of them trains every model like one process does.

A new strategy joins by one line in `STRATEGIES`. All models are trained in one launch a strategy, since starting torch
takes longer than training any of them.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import Run, Start
from models import MODELS
from safetensors.torch import load_file
from train_models import SAVE_AFTER

from paceline.verify.compare import DEFAULT_TOLERANCE, compare

SCRIPT = Path(__file__).with_name("train_models.py")


@dataclass(frozen=True)
class Strategy:
    """What is typed, and how many processes that makes."""

    flags: str
    replicas: int
    accumulate: int = 1
    models: tuple[str, ...] = tuple(MODELS)
    in_every_test_run: bool = True  # else `make soak` tries it: what it combines is in others one by one

    @property
    def has_servers(self) -> bool:
        return "--servers" in self.flags

    @property
    def needs_root(self) -> bool:
        return "--emulate" in self.flags


# torch.compile takes each process longer than all other models together: one strategy has it in every test run.
NOT_COMPILED = tuple(model for model in MODELS if model != "compiled")
# With servers replicas do not wait for one another in the middle of a pass: statistics are each one's own.
BATCHNORM = ("conv_batchnorm", "compiled", "masked_pixels", "activated_batchnorm")
OTHERS = tuple(model for model in MODELS if model not in BATCHNORM)
UNCLIPPED = tuple(model for model in NOT_COMPILED if MODELS[model]().clip_norm is None)

STRATEGIES = {
    "2 replicas": Strategy("--replicas 2", 2, models=NOT_COMPILED),
    "2 replicas, compiled": Strategy("--replicas 2", 2, models=("compiled",), in_every_test_run=False),
    "3 replicas, uneven parts": Strategy("--replicas 3", 3),
    "4 replicas, two a core": Strategy("--replicas 4", 4, models=NOT_COMPILED),
    "3 replicas, 3 passes a batch": Strategy("--replicas 3", 3, accumulate=3, models=NOT_COMPILED),
    "2 replicas, torch.distributed": Strategy("--replicas 2 --exchange collective", 2, models=NOT_COMPILED),
    "2 replicas, torch.distributed, overlapped": Strategy(
        "--replicas 2 --exchange collective --overlap", 2, models=UNCLIPPED
    ),
    "2 hosts of 2 replicas": Strategy("--replicas 4 --emulate hosts=2,link=1gbit", 4, models=NOT_COMPILED),
    "2 hosts of 2 replicas, 3 passes a batch, compiled": Strategy(
        "--replicas 4 --emulate hosts=2,link=1gbit", 4, accumulate=3, models=("compiled",), in_every_test_run=False
    ),
    "2 replicas, 1 server": Strategy("--replicas 2 --servers 1", 2, models=(*OTHERS, "conv_batchnorm")),
    "3 replicas, tables on 2 servers": Strategy("--replicas 3 --servers 2 --only sparse", 3, models=("sparse_table",)),
    "2 replicas, 3 servers over TCP": Strategy("--replicas 2 --servers 3 --exchange tcp", 2, models=OTHERS),
    "3 replicas, 2 servers, 3 passes a batch": Strategy("--replicas 3 --servers 2", 3, 3, OTHERS),
    "3 replicas in one process, 2 servers": Strategy("--replicas 3 --servers 2 --in-graph", 1, models=OTHERS),
    "3 replicas in one process that has the parameters": Strategy("--replicas 3 --in-graph", 1, models=OTHERS),
    "2 hosts of 1 replica and 1 server": Strategy(
        "--replicas 2 --servers 2 --emulate hosts=2,link=1gbit",
        2,
        models=("mlp", "tied_transformer", "masked_tokens", "sparse_table"),
        in_every_test_run=False,
    ),
    # A model cut over devices, each a process.
    "2 devices, hidden in parts": Strategy(
        "--mesh model=2 --layout hidden=model", 2, models=("mlp", "tied_transformer", "masked_tokens")
    ),
    "2 replicas of 2 devices, all in parts": Strategy(
        "--mesh data=2,model=2 --layout batch=data,heads=model,hidden=model,vocab=model",
        4,
        models=("tied_transformer",),
    ),
    "3 stages": Strategy(
        "--stages 3 --micro-batches 4", 3, models=("mlp", "tied_transformer", "whole_tensors", "masked_tokens")
    ),
    "2 replicas of 2 stages": Strategy(
        "--stages 2 --micro-batches 3 --replicas 2", 4, models=("mlp", "lstm", "masked_tokens"), in_every_test_run=False
    ),
    "2 hosts of a replica of 2 devices, hidden in parts": Strategy(
        "--mesh model=2 --layout hidden=model --replicas 2 --emulate hosts=2,link=1gbit", 4, models=("masked_tokens",)
    ),
    "2 hosts of a replica of 2 stages": Strategy(
        "--stages 2 --micro-batches 3 --replicas 2 --emulate hosts=2,link=1gbit",
        4,
        models=("mlp", "masked_tokens"),
        in_every_test_run=False,
    ),
    "2 stages on 2 hosts": Strategy(
        "--stages 2 --micro-batches 3 --replicas 1 --emulate hosts=2,link=1gbit",
        2,
        models=("tied_transformer", "masked_tokens"),
    ),
    "4 stages on 2 hosts": Strategy(
        "--stages 4 --micro-batches 2 --replicas 1 --emulate hosts=2,link=1gbit",
        4,
        models=("mlp", "tied_transformer", "masked_tokens", "whole_tensors"),
        in_every_test_run=False,
    ),
    "2 hosts of a replica of 2 tiles": Strategy(
        "--tiles 2 --replicas 2 --emulate hosts=2,link=1gbit",
        4,
        models=("conv_batchnorm", "masked_pixels", "activated_batchnorm"),
        in_every_test_run=False,
    ),
    "2 hosts of a wavefront over 2": Strategy(
        "--wavefront 2 --time-block 2 --replicas 2 --emulate hosts=2,link=1gbit",
        4,
        models=("lstm", "masked_frames"),
        in_every_test_run=False,
    ),
    "3 tiles": Strategy("--tiles 3", 3, models=("conv_batchnorm", "masked_pixels", "activated_batchnorm")),
    "2 replicas of 2 tiles": Strategy(
        "--tiles 2 --replicas 2", 4, models=("conv_batchnorm", "masked_pixels"), in_every_test_run=False
    ),
    "a wavefront over 2": Strategy("--wavefront 2 --time-block 4", 2, models=("lstm", "masked_frames")),
    "2 replicas of a wavefront over 2": Strategy(
        "--wavefront 2 --time-block 2 --replicas 2", 4, models=("lstm",), in_every_test_run=False
    ),
    "2 replicas of 2 devices, 2 servers": Strategy(
        "--mesh model=2 --layout hidden=model --replicas 2 --servers 2",
        4,
        models=("mlp", "tied_transformer", "masked_tokens"),
        in_every_test_run=False,
    ),
    "2 replicas of a wavefront over 2, 1 server": Strategy(
        "--wavefront 2 --time-block 2 --replicas 2 --servers 1 --exchange tcp",
        4,
        models=("lstm", "masked_frames"),
        in_every_test_run=False,
    ),
}
THREE = STRATEGIES["3 replicas, uneven parts"]


def marks_of(strategy: Strategy) -> list[pytest.MarkDecorator]:
    return [] if strategy.in_every_test_run else [pytest.mark.soak]


EVERY_STRATEGY = [pytest.param(strategy, id=name, marks=marks_of(strategy)) for name, strategy in STRATEGIES.items()]
EVERY_MODEL = [
    pytest.param(strategy, model, id=f"{name}-{model}", marks=marks_of(strategy))
    for name, strategy in STRATEGIES.items()
    for model in strategy.models
    if not (strategy.has_servers and model in BATCHNORM)
]

# Under autocast every replica's gradient is a product rounded to the 8 bits of bf16 before they are added up, and one
# process rounds the sum: equal to about 1/256, whatever the strategy does.
# In float64 there is next to nothing between them.
IN_FLOAT64 = ("masked_tokens", "masked_frames", "masked_pixels", "activated_batchnorm")
TOLERANCES = {"bf16_autocast": 2e-2, **dict.fromkeys(IN_FLOAT64, 1e-12)}


def tolerance_for(model: str) -> float:
    return TOLERANCES.get(model, DEFAULT_TOLERANCE)


def arguments_for(strategy: Strategy) -> str:
    return f"--record recorded --save . --accumulate {strategy.accumulate} --models {','.join(strategy.models)}"


@pytest.fixture(scope="module")
def one_process(request: pytest.FixtureRequest, start: Start) -> Callable[[int], Run]:
    """One process that records, by the number of passes a batch: statistics of BatchNorm depend on it. It trains what
    some test asks for."""
    asked = {item.callspec.params["strategy"] for item in request.session.items if _has_strategy(item, request.path)}
    runs = {}
    for passes in {strategy.accumulate for strategy in asked}:
        wanted = {model for strategy in asked if strategy.accumulate == passes for model in strategy.models}
        models = ",".join(model for model in MODELS if model in wanted)
        runs[passes] = start(SCRIPT, None, f"--record recorded --accumulate {passes} --models {models}")
    for run in runs.values():
        run.fine()
    return runs.__getitem__


def _has_strategy(item: pytest.Item, path: Path) -> bool:
    return item.path == path and "strategy" in getattr(item, "callspec", Namespace(params={})).params


@pytest.fixture(scope="module")
def trained(start: Start) -> Callable[[Strategy], Run]:
    """The one run of a strategy."""
    runs: dict[Strategy, Run] = {}

    def run_of(strategy: Strategy) -> Run:
        if strategy.needs_root and os.geteuid() != 0:
            pytest.skip("hosts are emulated by network namespaces, which only root may make")
        if strategy not in runs:
            runs[strategy] = start(SCRIPT, strategy.flags, arguments_for(strategy)).fine()
        return runs[strategy]

    return run_of


@pytest.mark.parametrize(("strategy", "model"), EVERY_MODEL)
def test_losses_gradients_state_and_parameters_are_those_of_one_process(
    strategy: Strategy, model: str, trained: Callable[[Strategy], Run], one_process: Callable[[int], Run]
) -> None:
    reference = one_process(strategy.accumulate).folder / "recorded" / model
    verdict = compare(reference, trained(strategy).folder / "recorded" / model, tolerance_for(model))
    assert verdict.equal, verdict.first
    assert verdict.steps == len(list(reference.glob("step-????.safetensors"))) >= 6


@pytest.mark.parametrize(("strategy", "model"), EVERY_MODEL)
def test_any_one_process_predicts_what_one_process_does(
    strategy: Strategy, model: str, trained: Callable[[Strategy], Run], one_process: Callable[[int], Run]
) -> None:
    """Before the first step, in mid-run and at the end; the first and the last process alone, then all."""
    expected, run = one_process(strategy.accumulate).told(f"{model} predicts"), trained(strategy)
    assert len(expected) == 3
    assert expected[0] != expected[1] != expected[2]
    for process in range(strategy.replicas):
        told = run.told(f"{model} predicts", process)
        assert len(told) == (3 if process in (0, strategy.replicas - 1) else 1)
        for found, wanted in zip(told, expected[-len(told) :], strict=True):
            scale = max(map(abs, wanted))
            assert found == pytest.approx(wanted, abs=tolerance_for(model) * scale), process


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_replicas_agree_bit_for_bit(strategy: Strategy, trained: Callable[[Strategy], Run]) -> None:
    run = trained(strategy)
    for model in strategy.models:
        first = run.told(model)
        for replica in range(1, strategy.replicas):
            assert run.told(model, replica) == first, f"{model} on replica {replica}"


@pytest.mark.parametrize("strategy", [case for case in EVERY_STRATEGY if "masked_tokens" in case.values[0].models])
def test_what_a_loss_logs_are_means_over_the_whole_batch(
    strategy: Strategy, trained: Callable[[Strategy], Run], one_process: Callable[[int], Run]
) -> None:
    expected, told = (run.told("masked_tokens")["logged"] for run in (one_process(1), trained(strategy)))
    assert len(told) == len(expected) >= 6
    for step, means in expected.items():
        assert told[step] == pytest.approx(means, rel=1e-12), step
        assert set(means) == {"right", "per place"}


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_nothing_is_left_behind(strategy: Strategy, trained: Callable[[Strategy], Run]) -> None:
    trained(strategy).assert_nothing_left()


def test_the_same_seed_gives_the_same_bits_twice(start: Start, trained: Callable[[Strategy], Run]) -> None:
    again = start(SCRIPT, THREE.flags, f"--models {','.join(NOT_COMPILED)}").fine()
    for model in NOT_COMPILED:
        assert again.told(model) == trained(THREE).told(model), model


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_loads_strictly_in_plain_torch(model: str, trained: Callable[[Strategy], Run]) -> None:
    folder = trained(THREE).folder
    saved = load_file(folder / f"{model}.safetensors")
    recorded = load_file(folder / "recorded" / model / f"step-{SAVE_AFTER - 1:04d}.safetensors")
    module = MODELS[model]().model
    module = getattr(module, "_orig_mod", module)
    module.load_state_dict(saved, strict=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, recorded[f"model/{name}"]), name


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        (None, tuple(MODELS)),
        ("--replicas 2", NOT_COMPILED),
        pytest.param("--replicas 4", tuple(MODELS), marks=pytest.mark.soak),
        ("--replicas 2 --servers 2", OTHERS),
        ("--mesh model=2 --layout hidden=model", ("mlp", "tied_transformer")),
        pytest.param("--stages 2", ("mlp", "tied_transformer"), marks=pytest.mark.soak),
        pytest.param("--tiles 2", ("conv_batchnorm",), marks=pytest.mark.soak),
        pytest.param("--wavefront 2", ("lstm",), marks=pytest.mark.soak),
        pytest.param("--stages 2 --replicas 2 --servers 1", ("mlp", "tied_transformer"), marks=pytest.mark.soak),
    ],
)
def test_what_three_replicas_have_saved_goes_on_with_any_strategy(
    flags: str | None, models: tuple[str, ...], start: Start, trained: Callable[[Strategy], Run]
) -> None:
    """With the losses, and the end, of the run that was not interrupted."""
    uninterrupted = trained(THREE)
    resumed = start(SCRIPT, flags, f"--resume {uninterrupted.folder} --models {','.join(models)}").fine()
    for model in models:
        expected, told = uninterrupted.told(model), resumed.told(model)
        later = {step: loss for step, loss in expected["losses"].items() if int(step) >= SAVE_AFTER}
        assert told["losses"] == pytest.approx(later, rel=tolerance_for(model)), model
        assert told["ledger"] == expected["ledger"]
