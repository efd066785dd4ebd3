"""What a function is given and returns, taken apart: tensors, and all else, which a graph has for good.

Tuples, lists and dicts are taken apart, and so are dataclasses and other mappings, which torch's own trees leave whole:
a tensor in one of these would be a constant of the graph, and every batch the first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.data.batch_values import dataclass_like, fields_of, is_dataclass, mapping_like
from paceline.errors import ModelError
from paceline.torch_private import tree_flatten, tree_unflatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)


@dataclass(frozen=True)
class Structure:
    """A value without its tensors: `fill` puts others in their places."""

    fill: Callable[[list[torch.Tensor]], Any]
    constants: tuple[Any, ...]  # what is no tensor
    words: str  # what else tells one structure from another

    def same_as(self, other: Structure) -> bool:
        """Returns whether two values differ in tensors at most."""
        if self.words != other.words or len(self.constants) != len(other.constants):
            return False
        return all(map(_equal, self.constants, other.constants))


def take_apart(
    value: Any, what: str, instead: Callable[[Any], Any] | None = None
) -> tuple[list[torch.Tensor], Structure]:
    """Returns the tensors of a value, and the rest. `what` it is, for the sentence that refuses what a graph cannot
    have; or what is to stand there `instead`."""
    leaves, spec = tree_flatten(value)
    tensors: list[torch.Tensor] = []
    constants: list[Any] = []
    parts: list[Callable[[list[torch.Tensor]], Any]] = []
    words = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(operator.itemgetter(len(tensors)))
            tensors.append(leaf)
        elif (inside := _inside(leaf)) is not None:
            content, rebuild = inside
            own, structure = take_apart(content, what, instead)
            parts.append(_at(len(tensors), len(own), structure, rebuild))
            tensors += own
            constants += structure.constants
            words += [type(leaf).__qualname__, structure.words]
        elif (plain := isinstance(leaf, _PLAIN) or callable(leaf)) or instead is not None:
            constants.append(leaf if plain or instead is None else instead(leaf))
            parts.append(partial(_constant, constants[-1]))
        elif isinstance(leaf, (torch.SymFloat, torch.SymInt, torch.SymBool)):
            raise ModelError(what, "a number that .item() has given", "return the scalar tensor itself")
        else:
            raise ModelError(
                what, f"it has a {type(leaf).__name__}", "give tensors, numbers, text, dataclasses, lists and dicts"
            )

    def fill(found: list[torch.Tensor]) -> Any:
        return tree_unflatten([part(found) for part in parts], spec)

    return tensors, Structure(fill, tuple(constants), "|".join(words))


def _constant(value: Any, _: list[torch.Tensor]) -> Any:
    return value


def _at(start: int, count: int, structure: Structure, rebuild: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda found: rebuild(structure.fill(found[start : start + count]))


def _inside(leaf: Any) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Any]] | None:
    """Returns what a value of a class of its own is made of, and how another is made like it; None if that is not
    known."""
    if is_dataclass(leaf):
        return dict(fields_of(leaf)), partial(dataclass_like, leaf)
    if isinstance(leaf, Mapping):
        return dict(leaf), partial(mapping_like, leaf)
    return None


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
