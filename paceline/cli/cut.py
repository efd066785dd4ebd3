"""Flags that cut a model over several devices, and the value behind them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from paceline.cli import is_count, whole
from paceline.errors import StrategyError
from paceline.split.values import BATCH, Layout, Split, Stages, Tiles, Wavefront

_WAYS = ("mesh", "stages", "tiles", "wavefront")
_NEEDS = {
    "layout": "mesh",
    "micro_batches": "stages",
    "schedule": "stages",
    "cut_at": "stages",
    "time_block": "wavefront",
}
CUT_FLAGS = (*_WAYS, *_NEEDS)


def add_cut_arguments(parser: argparse.ArgumentParser) -> None:
    """One model over several devices."""
    group = parser.add_argument_group("a model cut over several devices, each a process")
    group.add_argument("--mesh", metavar="AXES", help="by dimension: axes and their sizes, such as data=2,model=2")
    group.add_argument("--layout", metavar="DIMS", help="which dim lies along which axis: batch=data,hidden=model")
    group.add_argument("--stages", type=whole("stages", 1), metavar="N", help="by layer, as a pipeline")
    group.add_argument("--micro-batches", type=whole("micro-batches", 1), metavar="N", help="default 4 a stage")
    group.add_argument("--schedule", metavar="NAME", help="of the pipeline: 1f1b (default) or gpipe")
    group.add_argument("--cut-at", metavar="MODULES", help="where stages begin, default by measured cost")
    group.add_argument("--tiles", metavar="N|RxC", help="by image region: N rows, or 2x2")
    group.add_argument("--wavefront", type=whole("wavefront", 1), metavar="N", help="stacked RNNs, by layer and time")
    group.add_argument("--time-block", type=whole("time-block", 1), metavar="N", help="of the wavefront, default 8")


def read_split(given: Mapping[str, Any]) -> Split | None:
    """How the model is to be cut; None: not at all."""
    ways = [way for way in _WAYS if way in given]
    for flag, way in _NEEDS.items():
        if flag in given and way not in given:
            raise StrategyError(flag.replace("_", "-"), given[flag], f"it belongs to --{way}, add that")
    if not ways:
        return None
    if len(ways) > 1:
        raise StrategyError(ways[1], given[ways[1]], f"the model is cut by --{ways[0]} already, give one of them")
    if "mesh" in given:
        return Layout(mesh=_mesh(given["mesh"]), layout=_layout(given))
    if "stages" in given:
        return Stages(
            stages=given["stages"],
            micro_batches=given.get("micro_batches", 4 * given["stages"]),
            schedule=given.get("schedule", "1f1b"),
            cut_at=_modules(given["cut_at"]) if "cut_at" in given else (),
        )
    if "tiles" in given:
        return _tiles(given["tiles"])
    return Wavefront(parts=given["wavefront"], time_block=given.get("time_block", 8))


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise StrategyError("cut-at", text, "give names of modules, such as blocks.2,blocks.4")
    return names


def _mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().partition("=")
        if not (axis.isidentifier() and is_count(size) and int(size)):
            raise StrategyError("mesh", text, "give axes with sizes, such as data=2,model=2")
        if axis in mesh:
            raise StrategyError("mesh", text, f"axis {axis} is there twice, give it once")
        mesh[axis] = int(size)
    return mesh


def _layout(given: Mapping[str, Any]) -> dict[str, str]:
    text: str = given.get("layout", "")
    if not text:
        raise StrategyError(
            "mesh",
            given["mesh"],
            f"say which dim lies along which axis, --layout {BATCH}=AXIS,DIM=AXIS (paceline dims)",
        )
    layout: dict[str, str] = {}
    for entry in text.split(","):
        dim, equals, axis = entry.strip().partition("=")
        if not (dim and equals and axis):
            raise StrategyError("layout", text, "give dims with axes, such as batch=data,hidden=model")
        if dim in layout:
            raise StrategyError("layout", text, f"dim {dim} lies along {layout[dim]} already, give it one axis")
        layout[dim] = axis
    return layout


def _tiles(text: str) -> Tiles:
    rows, _, columns = text.partition("x")
    if not all(is_count(part) and int(part) for part in (rows, columns or "1")):
        raise StrategyError("tiles", text, "give a number of rows, such as 2, or rows x columns, such as 2x2")
    return Tiles(rows=int(rows), columns=int(columns or "1"))
