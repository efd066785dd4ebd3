"""What `paceline dims` shows: every parameter with the names of its dims, and what each name may be laid along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import Function, capture
from paceline.split.layout.atoms import leaves
from paceline.split.layout.model_dims import ModelDims


def tell_dims(function: Function, model: nn.Module, given: Any, patterns: Mapping[str, str], path: Path) -> None:
    """Writes the dims of the model, as `function(model, given)` uses it, into a file."""
    path.write_text(json.dumps(dims_of(function, model, given, patterns)))


def dims_of(function: Function, model: nn.Module, given: Any, patterns: Mapping[str, str]) -> dict[str, Any]:
    """Returns them: every parameter's, and for every name its sizes and how many elements have it."""
    return dims_in(capture(function, model, given), model, patterns)


def dims_in(call: CallGraph, model: nn.Module, patterns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the same of a graph that was captured already."""
    dimensions = ModelDims(model)
    dimensions.add(call)
    names = dimensions.names(patterns)
    rows = [
        {"parameter": name, "shape": list(parameter.shape), "dims": names.describe(name)}
        for name, parameter in model.named_parameters()
    ]
    totals: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        atoms = {leaf for dim in dimensions.parameters[name] for leaf in leaves(dim)}
        for dim in {names.of(atom) for atom in atoms}:
            entry = totals.setdefault(dim, {"sizes": [], "parameters": 0})
            entry["sizes"] = sorted({*entry["sizes"], *(atom.size for atom in atoms if names.of(atom) == dim)})
            entry["parameters"] += parameter.numel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": rows, "dims": {dim: totals[dim] for dim in names.known if dim in totals}, "elements": whole}
