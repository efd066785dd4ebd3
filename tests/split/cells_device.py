"""One device of several that train cells written by hand in waves, for tests: `cells_device.py RANK BOARD ARENA…`.

Reads cases, a line of JSON each, and says how far loss, gradients and buffers are from those of one process, and
whether random numbers go on alike.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from cell_models import MODELS, WORDS, loss
from torch import nn
from wavefront_device import serve

from paceline.exchange.mailboxes import Peers
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import Weight
from paceline.split.cut import SAME
from paceline.split.values import Wavefront
from paceline.split.wavefront import WavefrontCut


def make(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(case["seed"])
    model = MODELS[case["model"]]().double()
    for name in case["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model


def state(model: nn.Module, losses: list[float], predicted: torch.Tensor) -> dict[str, Any]:
    gradients = {f"of {name}": parameter.grad for name, parameter in model.named_parameters()}
    values = {"losses": torch.tensor(losses, dtype=torch.float64), "predicted in eval mode": predicted}
    return {**values, **gradients, **dict(model.named_buffers()), "random": torch.get_rng_state()}


def alone(case: dict[str, Any]) -> dict[str, Any]:
    """What one process finds: gradients of all batches add up."""
    model, losses = make(case), []
    for words in batches(case):
        found = loss(model, words)
        found.backward()
        losses.append(found.item())
    model.eval()
    with torch.no_grad():
        return state(model, losses, model(words))


def batches(case: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    return [torch.randint(WORDS, (batch, length), generator=generator) for batch, length in case["shapes"]]


def in_waves(case: dict[str, Any], peers: Peers) -> dict[str, Any]:
    """The same, of which this device computes a part; gradients and buffers are put together as owners do."""
    model, losses = make(case), []
    cut = WavefrontCut(Wavefront(parts=peers.count, time_block=case["time_block"]), peers)
    given = batches(case)
    cut.prepare(loss, model, given[0])
    cut.take(dict(model.named_parameters()) | dict(model.named_buffers()))
    group = peers.everyone
    for words in given:
        part = cut.train(loss, model, words, Weight.whole(), lambda returned: read_loss(returned, ""))
        mine = torch.tensor(part.loss.mean if part.loss is not None else 0.0, dtype=torch.float64)
        losses.append(group.all_reduce(mine).item())
        for name, buffer in model.named_buffers():
            added = torch.zeros_like(buffer) if cut.part_of(name) == SAME else buffer
            buffer.copy_(group.all_reduce(added))
    model.eval()
    with torch.no_grad():
        found = state(model, losses, cut.call(lambda called, given: called(given), model, words))
    for name, parameter in model.named_parameters():
        used = group.all_reduce(torch.tensor(parameter.grad is not None)).item()
        summand = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        found[f"of {name}"] = group.all_reduce(summand) if used else None
    return found


def distances(case: dict[str, Any], peers: Peers) -> dict[str, float | None]:
    """By tensor: how far it is from one process; None if it is there in one of both only."""
    expected, got = alone(case), in_waves(case, peers)
    assert got.keys() == expected.keys()
    found: dict[str, float | None] = {}
    for name, value in expected.items():
        mine = got[name]
        if value is None or mine is None:
            found[name] = 0.0 if value is None and mine is None else None
        else:
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), name
            found[name] = (mine.double() - value.double()).abs().max().item()
    return found


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), distances=distances)
