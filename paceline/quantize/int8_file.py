"""The file of a model in int8, and a model out of it.

    fc1.weight           int8      where the float file has the weight, under the same name
    fc1.weight.scale     float32   beside it; weight ≈ fc1.weight · fc1.weight.scale
    fc1.bias             float32   as ever; one that was none may have come of a BatchNorm, whose tensors are gone
    notes                          which layers, of what kind, how their inputs are rounded; what is tied to what

It is a checkpoint like any other (`checkpoint/`), with checksums and without training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from paceline import checkpoint
from paceline.errors import CheckpointError
from paceline.quantize.int8_layer import read_tensors
from paceline.quantize.kernels import can_compute
from paceline.quantize.layers import KINDS, kind_of
from paceline.quantize.rounding import InputRange
from paceline.quantize.swaps import Swap, let_modules_compute, places_of, put_into
from paceline.torch_private import AnyBatchNorm

NOTE = "int8"


class LayerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file says of a layer in int8."""

    name: str
    kind: str
    ranges: list[InputRange] = []
    norm: str | None = None  # the BatchNorm that is part of it


class Int8Note(msgspec.Struct, frozen=True):
    """What a file says of a model in int8."""

    layers: list[LayerNote]
    tied: dict[str, str] = {}  # names of tensors that are not in the file, and under which they are


def write_int8(path: Path, model: nn.Module, swaps: Iterable[Swap], notes: dict[str, Any]) -> None:
    """Writes the model, in which these layers are in int8, at this moment."""
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    tied: dict[str, str] = {}
    owners: dict[int, str] = {}  # by the parameter that it was rounded from
    layers = []
    for swap in swaps:
        layer = swap.layer
        layers.append(LayerNote(swap.name, layer.kind, list(layer.ranges), swap.norm))
        of = dict(swap.module.named_parameters())
        for local, tensor in layer.tensors().items():
            name = f"{swap.name}.{local}"
            weight = local.removesuffix(".scale")
            if weight in layer.weights and swap.norm is None and weight in of:
                first = owners.setdefault(id(of[weight]), swap.name + "." + weight)
                if first != f"{swap.name}.{weight}":
                    tied[name] = first + local.removeprefix(weight)
                    continue
            tensors[name] = tensor
    note = Int8Note(layers, tied)
    checkpoint.write_model(path, tensors, {**notes, NOTE: msgspec.to_builtins(note)})


def is_int8(notes: dict[str, Any]) -> bool:
    """Returns whether a file's notes are of a model in int8."""
    return NOTE in notes


def fill_int8(
    model: nn.Module, where: str, tensors: dict[str, torch.Tensor], notes: dict[str, Any], *, cut: bool
) -> None:
    """Makes the model that of the file `where`, with modules that compute in int8; those of a model that will be `cut`,
    or where there are no kernels, have the same weights in float."""
    try:
        note = msgspec.convert(notes[NOTE], Int8Note)
        tensors = {**tensors, **{name: tensors[first] for name, first in note.tied.items()}}
    except (msgspec.ValidationError, KeyError) as error:
        raise CheckpointError(f"{where} is damaged: its notes are not as they should be ({error})") from error
    in_float = cut or not can_compute()
    for layer in note.layers:
        _put(model, where, layer, _taken(tensors, layer.name), in_float=in_float)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            let_modules_compute(module)
    expanded = [layer.name for layer in note.layers] if in_float else []
    _fill_rest(model, where, tensors, expanded)


def _put(model: nn.Module, where: str, note: LayerNote, tensors: dict[str, torch.Tensor], *, in_float: bool) -> None:
    try:
        module = model.get_submodule(note.name)
    except AttributeError:
        raise CheckpointError(f"{where} has a layer {note.name!r}, unlike the model: give the model it is of") from None
    kind = KINDS.get(note.kind)
    if kind is None or kind_of(module) is not kind:
        raise CheckpointError(
            f"{where} has {note.name!r} as a {note.kind} in int8, and the model has a {type(module).__name__} there: "
            "give the model it is of"
        )
    own, _ = kind.parts(module)
    weights, floats = read_tensors(tensors)
    for name in sorted(own.keys() | weights.keys()):
        here = list(own[name].shape) if name in own else None
        there = list(weights[name].values.shape) if name in weights else None
        if here != there:
            raise CheckpointError(
                f"{where} has '{note.name}.{name}' of shape {there}, and the model of {here}: give the model it is of"
            )
        channels = [size if dim == kind.channel_dim else 1 for dim, size in enumerate(own[name].shape)]
        if weights[name].values.dtype != torch.int8 or list(weights[name].scales.shape) != channels:
            raise CheckpointError(f"{where} is damaged: '{note.name}.{name}' and its scales do not belong together")
    layer = kind.build(module, weights, floats, note.ranges)
    put_into(places_of(model, module), kind.expand(module, layer.float_tensors()) if in_float else layer)
    if note.norm is not None:
        norm = dict(model.named_modules()).get(note.norm)
        if not isinstance(norm, AnyBatchNorm):
            raise CheckpointError(f"{where} has a BatchNorm {note.norm!r}, unlike the model: give the model it is of")
        put_into(places_of(model, norm), nn.Identity())


def _taken(tensors: dict[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    """Takes what belongs to a layer out of the tensors, and returns it by the names there."""
    names = [name for name in tensors if name.startswith(f"{layer}.")]
    return {name.removeprefix(f"{layer}."): tensors.pop(name) for name in names}


def _fill_rest(model: nn.Module, where: str, tensors: dict[str, torch.Tensor], expanded: Sequence[str]) -> None:
    """Loads what is in float; the same tensors must be in both."""
    own = model.state_dict()
    if expanded:
        own = {name: it for name, it in own.items() if not name.startswith(tuple(f"{layer}." for layer in expanded))}
    check_same_tensors(where, own, tensors)
    model.load_state_dict(tensors, strict=False)


def check_same_tensors(where: str, own: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> None:
    """Raises unless a file has the model's own tensors, under the same names, in the same shapes."""
    for name in [*sorted(own.keys() - given.keys()), *sorted(given.keys() - own.keys())]:
        has = "has no" if name in own else "has a"
        raise CheckpointError(f"{where} {has} tensor {name!r}, unlike the model: give the model it is of")
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise CheckpointError(
                f"{where} has {name!r} of shape {list(given[name].shape)}, and the model of "
                f"{list(tensor.shape)}: give the model it is of"
            )
