"""Replicas on an accelerator train like one process on it: parameters and optimizer stay with the host, or on servers.

In every test run the model stays on the CPU and everybody takes that for an accelerator (`as-if`): what is copied
where, and when. On a real one, XLA's on a CPU, `make xla` has it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Run, Start
from test_contract import TOLERANCES

from paceline.verify.compare import DEFAULT_TOLERANCE, compare

SCRIPT = Path(__file__).with_name("train_models.py")
AS_IF, XLA = "as-if", "xla:0"
STRATEGIES = {
    "--replicas 2": ("mlp", "conv_batchnorm", "frozen_and_unused", "activated_batchnorm"),
    "--replicas 2 --servers 2": ("mlp", "frozen_and_unused", "conv_batchnorm"),
    "--replicas 2 --servers 1 --exchange tcp": ("mlp", "frozen_and_unused"),
    "--replicas 2 --in-graph": ("mlp", "frozen_and_unused", "conv_batchnorm"),
}
FLAGS = [pytest.param(flags, marks=pytest.mark.soak) if "tcp" in flags else flags for flags in STRATEGIES]
NO_XLA = importlib.util.find_spec("torch_xla") is None
DEVICES = [
    AS_IF,
    pytest.param(XLA, marks=[pytest.mark.soak, pytest.mark.skipif(NO_XLA, reason="torch_xla is not there (make xla)")]),
]


@pytest.fixture(scope="module")
def trained(start: Start) -> Callable[[str, str | None], Run]:
    """The one run of a strategy, or of one process, on a device."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    runs: dict[tuple[str, str | None], Run] = {}

    def run_of(device: str, flags: str | None) -> Run:
        if (device, flags) not in runs:
            everything = {model for models in STRATEGIES.values() for model in models}
            models = STRATEGIES[flags] if flags is not None else sorted(everything)
            there = "" if flags is None and device == AS_IF else f"--device {device}"
            arguments = f"{there} --record recorded --save . --models {','.join(models)}"
            runs[device, flags] = start(SCRIPT, flags, arguments).fine(300)
        return runs[device, flags]

    return run_of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS)
def test_losses_gradients_state_and_parameters_are_those_of_one_process_there(
    flags: str, device: str, trained: Callable[[str, str | None], Run]
) -> None:
    run, alone = trained(device, flags), trained(device, None)
    for model in STRATEGIES[flags]:
        if model == "conv_batchnorm" and flags != "--replicas 2":
            continue  # its statistics are each replica's own
        verdict = compare(
            alone.folder / "recorded" / model,
            run.folder / "recorded" / model,
            TOLERANCES.get(model, DEFAULT_TOLERANCE),
        )
        assert verdict.equal, (model, verdict.first)
        assert verdict.steps >= 6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS)
def test_replicas_on_a_device_agree_bit_for_bit(
    flags: str, device: str, trained: Callable[[str, str | None], Run]
) -> None:
    run = trained(device, flags)
    for model in STRATEGIES[flags]:
        for replica in range(1, 1 if "--in-graph" in flags else int(flags.split()[1])):
            assert run.told(model, replica) == run.told(model), model
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        pytest.param(
            "--replicas 2 --exchange collective",
            "exchange is 'collective': the model is on xla:0, and collectives",
            marks=pytest.mark.soak,
        ),
        ("--replicas 2 --devices cuda:0", "devices is 'cuda:0': the model of this replica is on cpu, put it there"),
    ],
)
def test_what_a_model_on_a_device_cannot_do_is_one_sentence(start: Start, flags: str, sentence: str) -> None:
    run = start(SCRIPT, flags, "--device as-if --models mlp").end()
    assert run.code == 1
    assert sentence in run.err
    assert "Traceback" not in run.err
