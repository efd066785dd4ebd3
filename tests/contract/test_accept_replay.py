"""With spare replicas a run is still that of one process: one that trains on the samples that were accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accept_training import CLIP, EPOCHS, SAMPLES, X, Y, loss, new_training
from conftest import Run, Start
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("accept_training.py")
REPLICAS, ACCEPT = 4, 3


@pytest.fixture(scope="module")
def run(start: Start) -> Run:
    return start(SCRIPT, f"--replicas {REPLICAS} --servers 2 --accept {ACCEPT}").fine()


@pytest.fixture(scope="module")
def steps(run: Run) -> list[dict[int, dict[str, Any]]]:
    """For every step that was closed: what each accepted replica has given to it."""
    found: list[dict[int, dict[str, Any]]] = [{} for _ in range(run.told("steps"))]
    for replica in range(REPLICAS):
        for ticket in run.all_told("ticket", replica):
            if ticket["accepted"] is not None:
                found[ticket["accepted"]][replica] = ticket
    return found


def test_different_replicas_are_accepted_and_late_ones_are_not_counted(
    run: Run, steps: list[dict[int, dict[str, Any]]]
) -> None:
    assert all(1 <= len(accepted) <= ACCEPT for accepted in steps)
    assert len({frozenset(accepted) for accepted in steps if len(accepted) == ACCEPT}) > 1
    assert any(ticket["accepted"] is None for replica in range(REPLICAS) for ticket in run.all_told("ticket", replica))
    counts = Counter(sample for accepted in steps for ticket in accepted.values() for sample in ticket["samples"])
    assert counts == dict.fromkeys(range(SAMPLES), EPOCHS)
    assert run.told("proof") == f"epochs 0 to {EPOCHS - 1}: {SAMPLES} samples, each once"


def test_one_process_with_the_accepted_samples_has_the_same_losses_and_parameters(
    run: Run, steps: list[dict[int, dict[str, Any]]]
) -> None:
    model, optimizer, scheduler = new_training()
    for accepted in steps:
        samples = torch.tensor([sample for ticket in accepted.values() for sample in ticket["samples"]])
        optimizer.zero_grad()
        value = loss(model, (X[samples], Y[samples], samples))
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        for ticket in accepted.values():
            assert ticket["loss"] == pytest.approx(value.item(), rel=1e-4)
    saved = load_file(run.folder / "model.safetensors")
    assert set(saved) == set(model.state_dict())
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(saved[name], parameter, rtol=1e-4, atol=1e-6)
