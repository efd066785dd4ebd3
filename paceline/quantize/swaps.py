"""Layers of a model, each in float or in int8, to and fro.

An `nn.BatchNorm` that takes just what a convolution or a linear layer gives is part of it in int8: it is a factor and
an addend for each channel. Whether it does is seen by watching, and proved by computing: with it folded, in float, the
model must answer what it answered before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from paceline.quantize.int8_convolution import Int8Convolution
from paceline.quantize.int8_layer import Int8Layer
from paceline.quantize.int8_linear import Int8Linear
from paceline.quantize.layers import FoundLayer
from paceline.torch_private import AnyBatchNorm, tree_leaves

ModulePlaces = list[tuple[nn.Module, str]]


class Swap:
    """One layer: the user's module, the one in int8, and the BatchNorm behind it if that is part of it."""

    def __init__(self, model: nn.Module, found: FoundLayer, norm: str | None) -> None:
        assert found.kind is not None
        self.name, self.module, self.norm, self.kind = found.name, found.module, norm, found.kind
        self._norm_module = None if norm is None else model.get_submodule(norm)
        weights, floats = found.kind.parts(found.module)
        if self._norm_module is not None:
            weight, bias = folded(found.module, self._norm_module)
            weights, floats = {"weight": weight}, {"bias": bias}
        self.layer: Int8Layer = found.kind.rounded(found.module, weights, floats)

        self._places = places_of(model, found.module)
        self._norm_places = [] if self._norm_module is None else places_of(model, self._norm_module)
        self._encoders = [
            owner
            for owner in model.modules()
            if isinstance(owner, nn.TransformerEncoderLayer) and found.module in set(owner.modules())
        ]

    def put(self, *, int8: bool) -> None:
        """Has the model compute this layer in int8, or in float."""
        put_into(self._places, self.layer if int8 else self.module)
        if self._norm_module is not None:
            put_into(self._norm_places, nn.Identity() if int8 else self._norm_module)
        for encoder in self._encoders:
            let_modules_compute(encoder)


def places_of(model: nn.Module, module: nn.Module) -> ModulePlaces:
    """Returns where a module is in a model: of which others it is a part, under what name."""
    return [(owner, last) for owner in model.modules() for last, its in owner.named_children() if its is module]


def put_into(places: ModulePlaces, module: nn.Module) -> None:
    """Puts a module into the place of another."""
    for owner, last in places:
        setattr(owner, last, module)


def let_modules_compute(layer: nn.TransformerEncoderLayer) -> None:
    """Has torch's encoder layer ask its modules if some are in int8: else it computes by itself, with their weights in
    float. It does so by one word, which says which of two activations it knows."""
    known = (nn.functional.relu, nn.ReLU), (nn.functional.gelu, nn.GELU)
    own = [at for at, (by, kind) in enumerate(known, 1) if layer.activation is by or isinstance(layer.activation, kind)]
    is_int8 = any(isinstance(module, Int8Layer) for module in layer.modules())
    layer.activation_relu_or_gelu = 0 if is_int8 or not own else own[0]


def folded(module: nn.Module, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weight and bias of the layer that computes both."""
    given: Any = module
    its: Any = norm
    factor = torch.rsqrt(its.running_var + its.eps)
    if its.weight is not None:
        factor = factor * its.weight.detach()
    bias = -its.running_mean * factor if given.bias is None else (given.bias.detach() - its.running_mean) * factor
    weight = given.weight.detach() * factor.view(-1, *[1] * (given.weight.dim() - 1))
    return weight, bias if its.bias is None else bias + its.bias.detach()


def find_norms(model: nn.Module, layers: Iterable[FoundLayer], answer: Callable[[], Any]) -> dict[str, str]:
    """Returns the BatchNorm that takes just what a layer gives, by layer. `answer()` has the model answer something."""
    takers = {name: module for name, module in model.named_modules() if isinstance(module, AnyBatchNorm)}
    givers = {layer.name: layer.module for layer in layers if layer.kind in (Int8Linear, Int8Convolution)}
    given: dict[int, tuple[str, torch.Tensor]] = {}  # by the tensor's id, which nobody else has while it is here
    pairs: dict[str, str] = {}
    calls: dict[str, int] = {}
    with ExitStack() as hooks:
        for name, module in givers.items():

            def gave(_: nn.Module, __: Any, y: Any, name: str = name) -> None:
                calls[name] = calls.get(name, 0) + 1
                given[id(y)] = (name, y)

            hooks.callback(module.register_forward_hook(gave).remove)
        for name, module in takers.items():

            def took(norm: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                calls[name] = calls.get(name, 0) + 1
                giver, y = given.get(id(args[0]), ("", None))
                by_channel = isinstance(givers.get(giver), nn.Linear) and y is not None and y.dim() != 2
                if y is not None and norm.running_mean is not None and not by_channel:
                    pairs[giver] = name

            hooks.callback(module.register_forward_pre_hook(took).remove)
        before = answer()
    found = {layer: norm for layer, norm in pairs.items() if calls[layer] == calls[norm] == 1}
    if not found or _same_when_folded(model, givers, found, before, answer):
        return found
    return {
        layer: norm for layer, norm in found.items() if _same_when_folded(model, givers, {layer: norm}, before, answer)
    }


def _same_when_folded(
    model: nn.Module, givers: dict[str, nn.Module], norms: dict[str, str], before: Any, answer: Callable[[], Any]
) -> bool:
    """Returns whether the model answers the same with all BatchNorms in their layers, so that nobody else sees them."""
    with ExitStack() as put_back:
        for name, norm in norms.items():
            module, norm_module = givers[name], model.get_submodule(norm)
            weight, bias = folded(module, norm_module)
            both = Int8Layer.expand(copy.deepcopy(module), {"weight": weight, "bias": bias})
            for its, other in ((module, both), (norm_module, nn.Identity())):
                places = places_of(model, its)
                put_into(places, other)
                put_back.callback(put_into, places, its)
        return all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))
            for a, b in zip(tree_leaves(before), tree_leaves(answer()), strict=True)
            if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel()
        )
