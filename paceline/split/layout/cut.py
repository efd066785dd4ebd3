"""A layout's cut: dims are named by tracing the model once, and every device runs the graph of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError, StrategyError
from paceline.exchange.mailboxes import DeviceGroup, Peers
from paceline.loss_value import LossPart, Weight
from paceline.optim.models import in_mode
from paceline.split.cut import SAME, WHOLE, Check, Cut, Example, Loss, TensorPart
from paceline.split.layout.atoms import Atom, leaves
from paceline.split.layout.axes import Axes, Usage
from paceline.split.layout.loss_check import LossCheck
from paceline.split.layout.model_dims import ModelDims
from paceline.split.layout.rewrite import GraphRewriter
from paceline.split.trace import Traced, tensors
from paceline.split.values import BATCH, Layout
from paceline.torch_private import inside_compiled, tree_flatten


class LayoutCut(Cut):
    """One device's side of a model that is cut by named dims."""

    def __init__(self, split: Layout, peers: Peers) -> None:
        super().__init__(peers)
        self._layout = split
        self._patterns: Mapping[str, str] = {}
        self._groups, self._coordinates = _along_axes(split.axes, peers)
        self._usage = Usage()
        self._dimensions: ModelDims
        self._axes: Axes
        self._graphs: list[tuple[Traced, nn.Module]] = []
        self._model: nn.Module
        self._loss_check: LossCheck | None = None  # while the first loss is computed

    def name_dims(self, dims: Mapping[str, str]) -> None:
        self._patterns = dims

    def prepare(self, model: nn.Module, example: Example) -> None:
        if inside_compiled(model) is not None:
            raise ModelError("model", "compiled", "a model is cut first and compiled never, leave out torch.compile")
        self._model = model
        self._dimensions = dimensions = ModelDims(model)
        traces = []
        for training in (True, False):
            with in_mode(model, training=training):
                traces.append(dimensions.trace(example, grad=training))
        names = dimensions.names(self._patterns)
        cuts: dict[Atom, str] = {}
        for dim, axis in self._layout.layout.items():
            names.check(dim)
            if dim != BATCH:
                cuts |= dict.fromkeys(names.named(dim), axis)
        for atom, axis in cuts.items():
            if atom.size < self._layout.axes[axis]:
                raise StrategyError(
                    "layout",
                    f"{names.of(atom)}={axis}",
                    f"that dim has {atom.size} elements and the axis {self._layout.axes[axis]} devices",
                )
        self._axes = Axes(self._groups, cuts)
        for traced, found in traces:
            self._graphs.append((traced, GraphRewriter(found, self._axes, self._usage).rewrite()))
        self._check_usage()
        model.forward = self._forward

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        if self._loss_check is not None:
            return super().train(loss, model, batch, weight, check)
        in_parts = [p for name, p in model.named_parameters() if self.part_of(name).index]
        with LossCheck(in_parts) as self._loss_check:  # once: what a loss uses does not change from step to step
            return super().train(loss, model, batch, weight, check)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss_check is None:
            return self._computed(args, kwargs)
        self._loss_check.in_forward = True
        try:
            return self._computed(args, kwargs)
        finally:
            self._loss_check.in_forward = False

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        for traced, graph in self._graphs:
            if traced.fits(self._model, leaves, spec):
                return graph(*tensors(leaves))
        # Another kind of call than any before.
        traced, found = self._dimensions.trace((args, kwargs), grad=torch.is_grad_enabled())
        self._graphs.append((traced, GraphRewriter(found, self._axes, self._usage).rewrite()))
        return self._graphs[-1][1](*tensors(leaves))

    def _check_usage(self) -> None:
        """Refuses parameters whose gradient would be a summand in one operator and the same on all devices in
        another."""
        for name, axes in self._usage.summand.items():
            mixed = axes & self._usage.alike.get(name, set())
            if mixed:
                raise ModelError(
                    "layout",
                    name,
                    f"it is used both in operators that are cut along {sorted(mixed)[0]} and in ones that are not; "
                    "lay another dim along that axis",
                )

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────

    def part_of(self, name: str) -> TensorPart:
        dims = self._dimensions.parameters[name]
        cuts = self._axes.cuts(dims)
        summand = self._usage.summand.get(name, set())
        # Along an axis it does not lie along, either everybody has a summand or the first one speaks for all.
        adds = all(axis in cuts.values() or axis in summand or self._coordinates[axis] == 0 for axis in self._groups)
        if not cuts:
            return WHOLE if adds else SAME
        holder = {axis: 0 if axis in cuts.values() else at for axis, at in self._coordinates.items()}
        atoms = [leaves(dim) for dim in dims]
        index = tuple(slice(*self._axes.range(leaf)) for dim in atoms for leaf in dim)
        shape = tuple(leaf.size for dim in atoms for leaf in dim) if any(len(dim) > 1 for dim in atoms) else ()
        return TensorPart(index, adds, _rank(holder, self._layout.axes), shape)


def _along_axes(axes: dict[str, int], peers: Peers) -> tuple[dict[str, DeviceGroup], dict[str, int]]:
    """Returns this device's group along every axis, and its place on each."""
    every = list(itertools.product(*(range(size) for size in axes.values())))
    mine = dict(zip(axes, every[peers.rank], strict=True))
    groups = {}
    for axis, size in axes.items():
        ranks = [_rank({**mine, axis: place}, axes) for place in range(size)]
        groups[axis] = peers.along(ranks)
    return groups, mine


def _rank(place: dict[str, int], axes: dict[str, int]) -> int:
    """Returns the number of the device at a place of the mesh."""
    rank = 0
    for axis, size in axes.items():
        rank = rank * size + place[axis]
    return rank
