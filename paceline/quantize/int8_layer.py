"""A layer in int8: what all kinds of them have in common.

A layer is made of the user's module, of the tensors that are in a file for it, and of the ranges of its inputs. While
it is calibrated it computes in float32 with its rounded weights, and looks at what comes in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline.quantize.ranges import InputLook
from paceline.quantize.rounding import InputRange, Int8Weight, round_weight

SCALE = ".scale"  # what is behind a weight's name in the name of its scales
Tensors = Mapping[str, torch.Tensor]


class Int8Layer(nn.Module):
    """A module that stands in the place of a user's, and computes the same in int8."""

    kind: ClassVar[str]
    inputs: ClassVar[int] = 1  # how many inputs it rounds by a range
    channel_dim: ClassVar[int] = 0  # of its weights: each channel has a scale

    def __init__(self, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]) -> None:
        """`weights`, `floats`: by their names in the user's module. No `ranges`: by the numbers of each call."""
        super().__init__()
        self.weights, self.floats, self.ranges = dict(weights), dict(floats), tuple(ranges)
        self.looks: tuple[InputLook, ...] | None = None  # while it is calibrated

    @staticmethod
    @abstractmethod
    def refusal(module: nn.Module) -> str | None:
        """Returns why this module cannot be in int8; None if it can."""

    @staticmethod
    @abstractmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns the weights of a module that int8 is for, and what stays in float, by name."""

    @classmethod
    def rounded(cls, module: nn.Module, weights: Tensors, floats: Tensors) -> Int8Layer:
        """Returns the layer of these tensors, which are in float."""
        return cls.build(module, {name: round_weight(it, cls.channel_dim) for name, it in weights.items()}, floats, ())

    @classmethod
    @abstractmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        """Returns the layer. The module says what the tensors do not: strides, heads, what comes first."""

    @staticmethod
    def expand(module: nn.Module, tensors: Tensors) -> nn.Module:
        """Returns the user's module with these tensors, which are in float."""
        for name, tensor in tensors.items():
            owner, _, last = name.rpartition(".")
            holder = module.get_submodule(owner)
            if parametrize.is_parametrized(holder, last):
                parametrize.remove_parametrizations(holder, last)
            setattr(holder, last, nn.Parameter(tensor, requires_grad=False))  # a bias may be new: that of a BatchNorm
        return module

    # ── calibrating ──────────────────────────────────────────────────────────────────────────────────────────

    def begin_look(self) -> None:
        """Looks at inputs from here on."""
        self.looks = tuple(InputLook() for _ in range(self.inputs))

    def end_look(self, *, dynamic: bool) -> str | None:
        """Takes the ranges over; returns why there are none, if so."""
        looks, self.looks = self.looks or (), None
        if not all(look.is_finite for look in looks):
            return "the evaluation gives it nothing, or numbers that are not finite"
        self.ranges = () if dynamic else tuple(look.found() for look in looks)
        return None

    # ── the file ─────────────────────────────────────────────────────────────────────────────────────────────

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what a file has of it, by its names in the user's module."""
        found = {}
        for name, weight in self.weights.items():
            found[name], found[name + SCALE] = weight.values, weight.scales
        return {**found, **self.floats}

    def float_tensors(self) -> dict[str, torch.Tensor]:
        """Returns its tensors, all in float."""
        return {**{name: weight.as_float for name, weight in self.weights.items()}, **self.floats}


def read_tensors(tensors: Tensors) -> tuple[dict[str, Int8Weight], dict[str, torch.Tensor]]:
    """Returns weights and floats of what `Int8Layer.tensors` has returned."""
    weights = {
        name: Int8Weight(tensor, tensors[name + SCALE]) for name, tensor in tensors.items() if name + SCALE in tensors
    }
    floats = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in weights and name.removesuffix(SCALE) not in weights
    }
    return weights, floats
