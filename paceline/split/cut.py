"""A cut: what one device does of a replica's work, and what its gradients are of the whole.

The gradient of a step is a sum over all devices of all replicas, as it is over replicas: a cut only decides what each
of them adds. The parameters lie whole, once a host, in the arena, and so does the model of every device: what a script
computes with it by itself is right. A cut computes with views of its parts of them, and its gradients go to the same
parts of a gradient buffer. So owners, clipping, checkpoints and `verify` need not know that a model is cut.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.exchange.mailboxes import Peers
from paceline.loss_value import FoundLoss, LossPart, Weight
from paceline.machine import check_shared_words
from paceline.split.values import Layout, Split, Stages, Tiles, Wavefront

Loss = Callable[[nn.Module, Any], Any]  # what it may return: see `loop/returned_loss.py`
Check = Callable[[Any], FoundLoss]
Function = Callable[[nn.Module, Any], Any]  # a loss, a metric, a call
Example = tuple[tuple[Any, ...], dict[str, Any]]  # what the model is called with


@dataclass(frozen=True)
class TensorPart:
    """One device's part of a parameter or a buffer, and where the part's gradient goes.

    `index`: its part of the whole, empty for all of it; a device's parameter becomes this view.
    `adds_to`: the device in whose buffer its gradient goes, its own (None) for a summand of the whole gradient;
    devices with disjoint parts may share one. `adds`: False if another device computes the very same gradient.
    """

    index: tuple[slice, ...] = ()
    adds: bool = True
    adds_to: int | None = None
    shape: tuple[int, ...] = ()  # seen as which the whole is indexed, if not as its own

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this part of a whole tensor, as a view."""
        return (whole.view(self.shape) if self.shape else whole)[self.index]


WHOLE = TensorPart()
SAME = TensorPart(adds=False)  # as on another device, which adds it


class Cut:
    """One device's side of a cut model. Each way of cutting is a subclass."""

    quickens_calls = True  # whether one batch is computed sooner by all devices together, without training
    another: Callable[[], Cut]  # returns one of the same kind, of which nothing is decided yet

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.is_at_work = False

    @property
    def speaks(self) -> bool:
        """Returns whether this device's loss and metrics count: true for one device of a replica."""
        return self.peers.rank == 0

    def name_dims(self, dims: Mapping[str, str]) -> None:
        """Takes the user's names for dims of parameters, by pattern. Only a layout has a use for them."""

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        """Decides who does what, before anything is computed; `function(model, given)` is what will be. If it cannot be
        cut so, one sentence says why (ModelError, StrategyError)."""
        raise NotImplementedError

    def part_of(self, name: str) -> TensorPart:
        """Returns, after `prepare`, this device's part of a parameter or buffer, by its (first) name in the model."""
        raise NotImplementedError

    def devices_using(self, name: str) -> Set[int]:
        """Returns the devices that compute with a parameter or buffer, after `prepare`."""
        return frozenset(range(self.peers.count))

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes this device's parts of parameters and buffers, by name, after `prepare`."""

    def release(self) -> None:
        """Takes back what `prepare` has done to the model."""

    def over_devices(self, module: nn.Module) -> bool:
        """Returns whether this BatchNorm sees a part of each sample, so that its statistics are sums over the
        devices too."""
        return False

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        """Runs forward and backward of a pass that counts `weight` in its step. `check` is given what the loss has
        returned, after forward and before backward, and returns it if it is a good one. Returns what it is of the
        step's loss; a device that does not speak may return `NOTHING`.

        Whoever cuts the batch further gives each part `weight.part(its share of the samples)`, and adds up what comes
        of them."""
        with self.at_work():
            return train(loss, model, batch, weight, check)

    def call(self, function: Function, model: nn.Module, given: Any) -> Any:
        """Returns `function(model, given)`, on every device, which all ask for it together."""
        with self.at_work():
            return function(model, given)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the model's forward do this device's part, inside; outside it is that of the whole model."""
        self.is_at_work = True
        try:
            yield
        except RuntimeError as error:
            if "once_differentiable" not in str(error):
                raise
            expected = "what devices exchange has a first derivative only; do not cut the model, use --replicas"
            raise ModelError("loss", "a gradient of a gradient", expected) from error
        finally:
            self.is_at_work = False


def train(loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
    """Runs forward and backward as in plain torch. Returns what the loss is of the step's."""
    found = check(loss(model, batch))
    found.backward(weight)
    return found.part(weight)


def call_model(model: nn.Module, given: Example) -> Any:
    """Returns what the model answers."""
    args, kwargs = given
    return model(*args, **kwargs)


def first_call(function: Function, model: nn.Module, given: Any) -> Example:
    """Returns what `function(model, given)` calls the model with; the model itself is not run."""

    class Called(Exception):
        pass

    found: list[Example] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise Called

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            function(model, given)
    except Called:
        return found[0]
    finally:
        handle.remove()
    raise ModelError("loss", "it never calls the model", "a cut model must be called as model(…) in the loss")


_CUTS: dict[type[Split], tuple[str, str]] = {
    Layout: ("paceline.split.layout", "LayoutCut"),
    Stages: ("paceline.split.stages", "StagesCut"),
    Tiles: ("paceline.split.tiles", "TilesCut"),
    Wavefront: ("paceline.split.wavefront", "WavefrontCut"),
}


def open_cut(split: Split, peers: Peers, dims: Mapping[str, str]) -> Cut:
    """Returns this device's side of the cut that was asked for; what a way of cutting needs is imported only now.

    `dims` are the names that the user has given to dims of parameters, for a layout."""
    check_shared_words("a model cannot be cut over devices")
    room, name = _CUTS[type(split)]
    cut: Cut = getattr(importlib.import_module(room), name)(split, peers)
    cut.name_dims(dims)
    cut.another = partial(open_cut, split, peers, dims)
    return cut
