"""Which recurrent modules of a model are cut, and who has which of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.errors import ModelError, StrategyError
from paceline.exchange.mailboxes import Peers
from paceline.optim.models import own_state
from paceline.split.balance import even_bounds
from paceline.split.cut import SAME, WHOLE, Cut, Function, TensorPart
from paceline.split.values import Wavefront
from paceline.split.wavefront.recurrent_module import RecurrentModule


class StackedModulesCut(Cut):
    """Every recurrent module of several layers is cut; everything else is computed on every device alike."""

    def __init__(self, split: Wavefront, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._device_of: dict[str, int] = {}  # by parameter of a layer

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        model, as_given = own_state(model), model
        refuse_bidirectional(model)
        stacked = stacked_modules(model)
        for name, module in stacked.items():
            if module.num_layers < self.peers.count:
                raise StrategyError(
                    "wavefront", self._split.parts, f"{name!r} has {module.num_layers} layers, give at most that many"
                )
        _check_weights(model, stacked)
        for name, module in stacked.items():
            bounds = even_bounds([_cost(module, layer) for layer in range(module.num_layers)], self.peers.count)
            for device in range(self.peers.count):
                own = range(bounds[device], bounds[device + 1])
                for layer in own:
                    for weight in _weights(module, layer):
                        self._device_of[f"{name}.{weight}" if name else weight] = device
                if device == self.peers.rank:
                    recurrent = RecurrentModule(name or "the model", module, own, self.peers, self._split.time_block)
                    recurrent.replace_forward(lambda: self.is_at_work, compiled=as_given is not model)

    def part_of(self, name: str) -> TensorPart:
        # Gradients of layers are with their device only; all others are the same on all.
        return WHOLE if self._device_of.get(name, 0) == self.peers.rank else SAME


def recurrent_modules(model: nn.Module) -> dict[str, nn.RNNBase]:
    """Returns all recurrent modules of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.RNNBase)}


def stacked_modules(model: nn.Module) -> dict[str, nn.RNNBase]:
    """Returns those of several layers."""
    return {name: module for name, module in recurrent_modules(model).items() if module.num_layers > 1}


def refuse_bidirectional(model: nn.Module) -> None:
    """Refuses a recurrent module whose layers cannot go through time together."""
    for name, module in recurrent_modules(model).items():
        if module.bidirectional:
            raise ModelError(
                "wavefront",
                name or type(module).__name__,
                "it is bidirectional, and its backward direction begins at the end of time, when all blocks of the "
                "layer below are done; make it unidirectional, or cut the model by --stages",
            )


def _check_weights(model: nn.Module, stacked: Mapping[str, nn.RNNBase]) -> None:
    """Refuses a weight of a layer that is no parameter, or somebody else's too: its gradient is with the layer's
    device."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append(f"{name}.{own}" if name else own)
    for name, module in stacked.items():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for own in (own for layer in range(module.num_layers) for own in _weights(module, layer)):
            parameter, weight = parameters.get(own), f"{name}.{own}" if name else own
            if parameter is None:
                expected = "it is computed from other parameters, by weight_norm or the like; give it as one parameter"
                raise ModelError("wavefront", weight, expected)
            if len(holders[parameter]) > 1:
                other = next(holder for holder in holders[parameter] if holder != weight)
                expected = f"it is {other} as well, and layers on several devices cannot share; give it its own"
                raise ModelError("wavefront", weight, expected)


def _weights(module: nn.RNNBase, layer: int) -> list[str]:
    """Returns the names of a layer's weights, as torch documents them."""
    biases = ["bias_ih", "bias_hh"] if module.bias else []
    projection = ["weight_hr"] if module.proj_size else []
    return [f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", *biases, *projection)]


def _cost(module: nn.RNNBase, layer: int) -> int:
    """Returns what a layer costs: the elements of its matrices."""
    weights = (module.get_parameter(name) for name in _weights(module, layer))
    return sum(weight.numel() for weight in weights if weight.dim() == 2)
