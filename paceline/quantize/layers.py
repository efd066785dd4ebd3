"""Which modules of a model can be in int8, and why the others cannot.

Only a module that computes as torch's own class does is taken: one with a forward of its own, or with hooks, stays as
it is, since nobody knows what it means. A weight that is computed (weight norm, spectral norm) is taken as it is in
eval mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline.quantize.int8_attention import Int8Attention
from paceline.quantize.int8_convolution import Int8Convolution
from paceline.quantize.int8_embedding import Int8Embedding
from paceline.quantize.int8_layer import Int8Layer
from paceline.quantize.int8_linear import Int8Conv1D, Int8Linear, is_transformers_conv1d
from paceline.quantize.int8_recurrent import Int8Recurrent
from paceline.torch_private import has_hooks

_KINDS: tuple[tuple[type[nn.Module], type[Int8Layer]], ...] = (
    (nn.Linear, Int8Linear),
    (nn.Conv1d, Int8Convolution),
    (nn.Conv2d, Int8Convolution),
    (nn.Embedding, Int8Embedding),
    (nn.MultiheadAttention, Int8Attention),
    (nn.LSTM, Int8Recurrent),
    (nn.GRU, Int8Recurrent),
)
KINDS: dict[str, type[Int8Layer]] = {Int8Conv1D.kind: Int8Conv1D}  # by the name that is in files
KINDS |= {layer.kind: layer for _, layer in _KINDS}


@dataclass
class FoundLayer:
    """A module of the user's that has weights, and what stands for it in int8; `refusal`: why nothing does."""

    name: str
    module: nn.Module
    kind: type[Int8Layer] | None
    refusal: str = ""
    tied: list[str] = field(default_factory=list)  # layers with the same weight: all of them are in int8, or none


def find_layers(model: nn.Module) -> list[FoundLayer]:
    """Returns every module that has a weight of two dims or more of its own, in the order of the model."""
    found = list(_found(model))
    by_weight: dict[int, list[FoundLayer]] = {}
    for layer in found:
        for parameter in layer.module.parameters():
            by_weight.setdefault(id(parameter), []).append(layer)
    for together in by_weight.values():
        if len(together) > 1:
            names = [layer.name for layer in together]
            alone = [layer for layer in together if layer.kind is None]
            for layer in together:
                layer.tied = names
                if alone and layer.kind is not None:
                    layer.kind, layer.refusal = None, f"its weight is that of {alone[0].name} too, which stays in float"
    return found


def kind_of(module: nn.Module) -> type[Int8Layer] | None:
    """Returns what stands for a module in int8, by its class alone."""
    own = parametrize.type_before_parametrizations(module) if parametrize.is_parametrized(module) else type(module)
    if is_transformers_conv1d(module):
        return Int8Conv1D
    for theirs, layer in _KINDS:
        if issubclass(own, theirs) and own.forward is theirs.forward:
            return layer
    return None


def _found(model: nn.Module) -> Iterator[FoundLayer]:
    inside: tuple[str, ...] = ()  # modules that another layer has taken, as attention takes its projection
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        kind = kind_of(module)
        if kind is None:
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                yield FoundLayer(name, module, None, f"a {type(module).__name__} computes in its own way")
            continue
        inside = (*inside, f"{name}.")
        refusal = _refusal(module) or kind.refusal(module)
        if not name:
            refusal = "it is the model itself, put it into an nn.Sequential"
        yield FoundLayer(name, module, None if refusal else kind, refusal or "")


def _refusal(module: nn.Module) -> str | None:
    if has_hooks(module):
        return "it has hooks"
    for parameter in module.parameters():
        if parameter.dtype != torch.float32:
            return f"it is in {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.device.type != "cpu":
            return f"it is on {parameter.device}"
    return None
