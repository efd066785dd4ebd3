"""A layout's cut: dims are named by the graph of the loss, and every device runs the graph of its parts."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.errors import ModelError, StrategyError
from paceline.exchange.mailboxes import DeviceGroup, Peers
from paceline.graph.call_graph import CallGraph
from paceline.graph.kept import KeptGraph
from paceline.optim.batchnorm import statistics_of
from paceline.split.cut import SAME, WHOLE, TensorPart
from paceline.split.graph_cut import GraphCut
from paceline.split.layout.atoms import Atom, join, leaves
from paceline.split.layout.axes import Axes, Usage
from paceline.split.layout.model_dims import ModelDims
from paceline.split.layout.names import Names
from paceline.split.layout.rewrite import GraphRewriter
from paceline.split.values import BATCH, Layout

_TOLD = 3  # dims in a sentence


class LayoutCut(GraphCut):
    """One device's side of a model that is cut by named dims."""

    def __init__(self, split: Layout, peers: Peers) -> None:
        super().__init__(peers)
        self._layout = split
        self._patterns: Mapping[str, str] = {}
        self._groups, self._coordinates = _along_axes(split.axes, peers)
        self._usage = Usage()
        self._dimensions: ModelDims
        self._decided: tuple[CallGraph, GraphRewriter]  # by which parameters are cut
        self._axes: Axes
        self._written: set[str] = set()  # buffers that change in place, and so are whole

    def name_dims(self, dims: Mapping[str, str]) -> None:
        self._patterns = dims

    def decide(self, kept: KeptGraph, values: list[torch.Tensor]) -> None:
        self._dimensions = ModelDims(self.model)
        dims = self._dimensions.add(kept.graph)
        names = self._dimensions.names(self._patterns)
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
        if self.peers.first:
            for dim, axis in self._layout.layout.items():
                self._tell_of_others(names, dim, axis)
        self._axes = Axes(self._groups, cuts)
        self._written = dims.written
        rewriter = GraphRewriter(dims, self._axes, self._usage, self._written, decides=True)
        self._decided = kept.graph, rewriter
        if rewriter.whole and self.peers.first:
            most = sorted(rewriter.whole.items(), key=lambda entry: -entry[1])[:3]
            told = ", ".join(f"{name} ({elements:,} elements)" for name, elements in most)
            warnings.warn(f"layout: computed whole on every device, which costs time: {told}", stacklevel=2)

    def _tell_of_others(self, names: Names, dim: str, axis: str) -> None:
        """Says which dims are alike and stay whole, when a layout names a dim that only some layers have."""
        if dim == BATCH:
            return
        alike = [name for name in names.known if re.fullmatch(rf"{re.escape(dim)}\d+", name)]
        left = [name for name in alike if name not in self._layout.layout]
        if left:
            where = ", ".join(f"{name} in {names.parameter_with(name)}" for name in left[:_TOLD])
            more = f" and {len(left) - _TOLD} more" if len(left) > _TOLD else ""
            warnings.warn(
                f"layout: only some layers have {dim}, {names.parameter_with(dim)} say; {where}{more} "
                f"stay whole: lay them along {axis} too, or call them {dim} (dims)",
                stacklevel=2,
            )

    def open(self, call: CallGraph) -> Callable[[list[torch.Tensor]], list[Any]]:
        part = self._as_decided(call).rewrite(statistics_of(self.model))
        run = part.runs(
            part.nodes,
            [*part.inputs, *part.tensors.values(), *part.constants],
            [value for value in part.returned if not isinstance(value, torch.Tensor)],
        )
        names, constants = list(part.tensors), list(part.constants.values())

        def compute(inputs: list[torch.Tensor]) -> list[Any]:
            return list(run(*inputs, *(self.tensors[name] for name in names), *constants))

        return compute

    def _as_decided(self, call: CallGraph) -> GraphRewriter:
        """Returns what rewrites a graph: parameters are cut as they are, whatever it joins and splits."""
        if call is self._decided[0]:
            return self._decided[1]
        dimensions = ModelDims(self.model)
        same: dict[Atom, Atom] = {}  # what is one atom there is one here
        for name, dims in dimensions.parameters.items():
            for dim, first in zip(dims, self._dimensions.parameters[name], strict=True):
                join([same.setdefault(leaf, Atom(leaf.size)) for leaf in leaves(first)], dim)
        cuts = {atom.find(): axis for leaf, atom in same.items() if (axis := self._axes.of(leaf)) is not None}
        found = dimensions.add(call)
        for atom in cuts:
            if len(atom.leaves()) > 1:
                raise ModelError(
                    "layout", f"a dim of {atom.size}", "called like this the model divides it further than in the loss"
                )
        axes = Axes(self._groups, {atom.find(): axis for atom, axis in cuts.items()})
        for name in sorted(found.written - self._written):
            if axes.cuts(dimensions.parameters[name]):
                raise ModelError("layout", name, "called like this the model changes that buffer, which is in parts")
        return GraphRewriter(found, axes, self._usage, self._written, decides=False)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────

    def part_of(self, name: str) -> TensorPart:
        dims = self._dimensions.parameters[name]
        cuts = self._axes.cuts(dims) if name not in self._written else {}
        # Along an axis it does not lie along, either everybody has a summand or the first one speaks for all.
        adds = all(
            axis in cuts.values() or self._usage.is_summand(name, axis) or self._coordinates[axis] == 0
            for axis in self._groups
        )
        if not cuts:
            return WHOLE if adds else SAME
        holder = {axis: 0 if axis in cuts.values() else at for axis, at in self._coordinates.items()}
        atoms = [leaves(dim) for dim in dims]
        index = tuple(
            slice(*(self._axes.range(leaf) if leaf in cuts else (0, leaf.size))) for dim in atoms for leaf in dim
        )
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
