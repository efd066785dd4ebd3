"""One device of several that compute an image model in tiles, for tests: `tiles_device.py RANK BOARD ARENA…`.

Reads cases, a line of JSON each, and says how far each tensor is from what one process gives: the output, in training
and in evaluation, buffers, the gradient of every parameter and of the input.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import InvalidInput
from paceline.exchange.board import Board
from paceline.exchange.mailboxes import Peers
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import SumUnit, Weight
from paceline.memory.arena import Arena
from paceline.memory.channels_last import channels_are_last
from paceline.optim import direct_gradients
from paceline.optim.batchnorm import Statistics, make_exact
from paceline.optim.gradients import GradientCollector, IntoBuffer
from paceline.split.cut import train
from paceline.split.tiles import TilesCut, samples
from paceline.split.tiles.tile import Tile
from paceline.split.values import Tiles

TIMEOUT_S = 20.0
PAYS = samples.PAYS, samples.PAYS_AT_ONCE
Tensors = dict[str, torch.Tensor]


class Residual(nn.Module):
    """The input and what some layers make of it: added, or side by side as channels."""

    def __init__(self, layers: nn.Module, joined: str) -> None:
        super().__init__()
        self.layers, self.joined = layers, joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if y.shape[2:] != x.shape[2:]:
            return y  # type: ignore[no-any-return]
        if self.joined == "cat":
            return torch.cat([x, y], 1)
        return x + y if x.shape == y.shape else y  # type: ignore[no-any-return]


class Squeeze(nn.Module):
    """Channels weighed by what the whole image is like."""

    def __init__(self, channels: int, way: str) -> None:
        super().__init__()
        self.fc, self.way = nn.Linear(channels, channels), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = F.adaptive_avg_pool2d(x, 1).flatten(1) if self.way == "pool" else x.mean((2, 3))
        gate = torch.sigmoid(self.fc(mean)).view(x.size(0), -1, 1, 1)
        return x * (gate.expand_as(x) if self.way == "pool" else gate)


class Function(nn.Module):
    """What people write in a forward."""

    def __init__(self, name: str, channels: int) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = {
            "shuffle": lambda: x.view(x.size(0), x.size(1), 1, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
            "half": lambda: torch.cat([part * 2 for part in x.chunk(2, 1)], dim=1),
            "channels last": lambda: F.layer_norm(x.permute(0, 2, 3, 1), [x.size(1)]).permute(0, 3, 1, 2),
            "weighted": lambda: 1 - x * self.weight + x[:, :1],
            "in place": lambda: x.clone().mul_(self.weight).relu_(),
            "whole map": lambda: x + torch.linspace(0, 1, x.size(2), dtype=x.dtype).view(-1, 1),
            "largest": lambda: x / (1 + x.abs().amax(1, keepdim=True)),
            "unknown": lambda: torch.flip(x, (2,)) + x.cumsum(2) / 10,
            "softmax": lambda: x.softmax(1),
            "norm": lambda: x / (1 + x.square().sum()),
            "pad": lambda: F.pad(x, (1, 2, 2, 0), value=0.5),
            "where": lambda: torch.where(x > 0, x, 0.1 * x),
            "by sample": lambda: x if not isinstance(x, Tile) or x.dims == (0,) else x * math.nan,
            "by row": lambda: x if not isinstance(x, Tile) or x.dims == (2,) else x * math.nan,
            "side by side": lambda: x if not isinstance(x, Tile) or channels_are_last(x.local) else x * math.nan,
            "planes": lambda: x if not isinstance(x, Tile) or not channels_are_last(x.local) else x * math.nan,
            "merged": lambda: x.view(-1, 1, *x.shape[2:]).mul(2).view(x.shape),
            "rows": lambda: x + x.cumsum(2).view(len(x), -1).view(x.shape),
            "where am I": lambda: x * (2.0 if x.shape[2] > 5 and x.requires_grad else 1.0),
        }
        if self.name == "assigned":
            x[:, :1] = 0
            return x
        return ways[self.name]()


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "flat": lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)),
    "sequence": lambda: nn.Sequential(
        nn.Conv1d(3, 4, 4, stride=2, padding=1),
        nn.BatchNorm1d(4),
        nn.MaxPool1d(3, 1),
        nn.Upsample(scale_factor=2, mode="linear"),
        nn.ConvTranspose1d(4, 2, 3, stride=2),
        nn.AvgPool1d(3, 2, padding=1),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    ),
    "volume": lambda: nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1),
        nn.BatchNorm3d(3),
        nn.MaxPool3d(2, 1),
        nn.AvgPool3d((2, 1, 2), ceil_mode=True),
        nn.Flatten(),
    ),
}


def make(case: dict[str, Any]) -> tuple[nn.Module, torch.Tensor]:
    """The model and its images, the same each time. Layers that the images are too small for are left out."""
    torch.manual_seed(case["seed"])
    images, *shape = case["shape"]
    if "InstanceNorm2d" in json.dumps(case["layers"]):
        # Of a single image torch's own has a wrong gradient if that of its output lies channels last.
        images = 2
    x = torch.randn(images, *shape, dtype=torch.float64)
    if case["head"] in OTHERS:
        return OTHERS[case["head"]]().double(), x.requires_grad_(case["input_wanted"])
    layers, out = _stack(case["layers"], x)
    head: dict[str, list[nn.Module]] = {
        "dense": [nn.Conv2d(out.size(1), 2, 1)],
        "flatten": [nn.Flatten(), nn.Linear(out[0].numel(), 3)],
        "pool": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out.size(1), 3)],
        "grid": [nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(out.size(1) * 4, 3)],
    }
    model = nn.Sequential(*layers, *head[case["head"]]).double()
    if case["last"]:
        model = model.to(memory_format=torch.channels_last)
        x = x if case["last"] == "weights" else x.to(memory_format=torch.channels_last)
    return model, x.requires_grad_(case["input_wanted"])


def _stack(described: list[Any], x: torch.Tensor) -> tuple[list[nn.Module], torch.Tensor]:
    layers = []
    for kind, options in described:
        layer = _layer(kind, options, x).double()
        try:
            found = layer(x)
        except (RuntimeError, ValueError):
            continue
        if found.numel() and found.numel() <= 40_000:
            layers.append(layer)
            x = found.detach()
    return layers, x


def _layer(kind: str, options: dict[str, Any], x: torch.Tensor) -> nn.Module:
    channels = x.size(1)
    if kind in ("Conv2d", "ConvTranspose2d"):
        groups = channels if options.get("groups") == "all" else 1
        out = channels if groups > 1 else options["out"]
        rest = {name: value for name, value in options.items() if name not in ("out", "groups")}
        return getattr(nn, kind)(channels, out, groups=groups, **rest)  # type: ignore[no-any-return]
    if kind in ("BatchNorm2d", "InstanceNorm2d", "PReLU"):
        return getattr(nn, kind)(channels, **options)  # type: ignore[no-any-return]
    if kind == "GroupNorm":
        return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)
    if kind == "Residual":
        inner = nn.Sequential(*_stack(options["layers"], x)[0])
        return Residual(inner, options["joined"])
    if kind == "Squeeze":
        return Squeeze(channels, **options)
    if kind == "Function":
        return Function(options["name"], channels)
    return getattr(nn, kind)(**options)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Depends on every value of the output, and differently; and on the parameters themselves."""
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return (y * weights).sum() + 0.1 * y.square().mean() + 0.01 * penalty  # type: ignore[no-any-return]


def compute(
    model: nn.Module, x: torch.Tensor, cut: TilesCut | None, statistics: Statistics, *, collected: bool = False
) -> Tensors:
    """What one pass finds. `collected`: gradients go where a step has them go, those of convolutions when there is
    time."""
    outputs: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    torch.manual_seed(5)
    model.train()
    half = Weight(0.5, SumUnit(1, 1))
    parameters = list(model.parameters())
    places = [torch.full_like(parameter, 7.0) for parameter in parameters]
    collector = GradientCollector(parameters, list(map(IntoBuffer, places))) if collected else None
    with collector.step() if collector is not None else nullcontext():
        (train if cut is None else cut.train)(loss, model, x, half, lambda found: read_loss(found, ""))
    if collector is not None:
        for parameter, place, used in zip(parameters, places, collector.finish(), strict=True):
            parameter.grad = place if used else None
        collector.close()
    statistics.sum = None
    found = {"output": outputs[0]}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    if x.grad is not None:
        found["input's gradient"] = x.grad
    model.eval()
    with torch.no_grad():
        found["evaluation"] = model(x) if cut is None else cut.call(lambda called, x: called(x), model, x)
    handle.remove()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if cut is not None:
            adds = gradient is not None and cut.part_of(name).adds
            gradient = cut.peers.everyone.all_reduce(gradient if adds and gradient is not None else 0 * parameter)
        found[f"gradient {name}"] = torch.zeros_like(parameter) if gradient is None else gradient
    return found


def measure(case: dict[str, Any], peers: Peers) -> dict[str, Any]:
    model, x = make(case)
    own, own_x = copy.deepcopy(model), x.detach().clone(memory_format=torch.preserve_format)
    own_x.requires_grad_(x.requires_grad)
    try:
        expected = compute(model, x, None, Statistics())
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return {"distances": {}}  # a layer changes in place what another needs: torch itself has no gradient
    if not all(tensor.isfinite().all() for tensor in expected.values()):
        return {"distances": {}}  # a window of a pooling that is padding alone
    # Small images are dealt out by sample at once.
    samples.PAYS, samples.PAYS_AT_ONCE = (math.inf, math.inf) if case["by_row"] else PAYS
    cut, statistics = TilesCut(Tiles(rows=case["rows"], columns=case["columns"]), peers), Statistics()
    make_exact(own, Statistics())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            cut.prepare(lambda called, x: called(x), own, own_x)
        except InvalidInput as error:
            return {"refused": str(error)}
    for module in own.modules():
        if isinstance(module, _BatchNorm) and cut.over_devices(module):
            module._statistics = statistics  # type: ignore[assignment]
    statistics.sum = peers.everyone.all_reduce
    found = compute(own, own_x, cut, statistics, collected=case["collected"])
    assert found.keys() == expected.keys()
    return {
        "distances": {name: _distance(found[name], expected[name]) for name in expected},
        "model": str(model),
        "warned": [str(warning.message) for warning in warned],
        "first alone": sorted(name for name, _ in own.named_parameters() if not cut.part_of(name).adds),
        "over devices": sorted(name for name, module in own.named_modules() if cut.over_devices(module)),
    }


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / scale if expected.numel() else 0.0


def main(rank: int, board: Board, arenas: list[Arena]) -> None:
    torch.set_num_threads(1)
    direct_gradients.LEAST_ELEMENTS = direct_gradients.LEAST_OF_CONVOLUTION = 1
    for line in sys.stdin:
        case = json.loads(line)
        count = case["rows"] * case["columns"]
        answer: dict[str, Any] = {}
        if rank < count:
            try:
                answer = measure(case, Peers(arenas[count - 1], board, rank, rank, count, TIMEOUT_S))
            except Exception:
                answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    given = [int(number) for number in sys.argv[1:]]
    main(given[0], Board(given[1]), [Arena.of(descriptor) for descriptor in given[2:]])
