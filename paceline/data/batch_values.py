"""A batch is a value of any class with tensors somewhere in it: what is done to all of them, whatever holds them.

Tuples, named tuples, lists and mappings (a tokenizer's `BatchEncoding`, a `UserDict`) are gone through, and so are
dataclasses. What comes back is of the same classes: it is a shallow copy in which the tensors are others, so that
nothing has to be registered and no constructor is called that may want something else. Everything else is left alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(act: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns the same kind of value, with `act(tensor)` in the place of every tensor.

    >>> from collections import UserDict
    >>> map_tensors(lambda tensor: tensor.tolist(), (Tensor([1]), UserDict(x=Tensor([2]), name="a")))
    ([1.0], {'x': [2.0], 'name': 'a'})
    """

    def changed(leaf: Any) -> Any:
        return act(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(changed, value)


def map_leaves(act: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Returns the same kind of value, with `act(leaf)` in the place of whatever holds nothing else, or `is_leaf` says
    is to be taken as one."""
    if is_leaf(value):
        return act(value)
    if isinstance(value, Mapping):
        return mapping_like(value, {key: map_leaves(act, item, is_leaf) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return sequence_like(value, [map_leaves(act, item, is_leaf) for item in value])
    if is_dataclass(value):
        return dataclass_like(value, {name: map_leaves(act, item, is_leaf) for name, item in fields_of(value)})
    return act(value)


def tensors_in(value: Any) -> Iterator[Tensor | None]:
    """Yields the leaves of a value in order; None for those that are no tensors."""
    return (leaf if isinstance(leaf, Tensor) else None for leaf in leaves_in(value))


def leaves_in(value: Any) -> Iterator[Any]:
    """Yields whatever holds nothing else, in order."""
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (tuple, list)):
        inner = list(value)
    elif is_dataclass(value):
        inner = [item for _, item in fields_of(value)]
    else:
        yield value
        return
    for item in inner:
        yield from leaves_in(item)


def without_samples(value: Any) -> Any:
    """Returns the same kind of batch as this one of a single sample, with none: its tensors and its lists of plain
    things (names, say) are empty.

    >>> without_samples({"x": Tensor([[1, 2]]), "name": ["a"], "scale": 0.5})
    {'x': tensor([], size=(0, 2)), 'name': [], 'scale': 0.5}
    """
    if isinstance(value, Tensor):
        return value[:0] if value.dim() else value
    if isinstance(value, Mapping):
        return mapping_like(value, {key: without_samples(item) for key, item in value.items()})
    if isinstance(value, list) and len(value) == 1 and list(tensors_in(value)) == [None]:
        return sequence_like(value, [])
    if isinstance(value, (tuple, list)):
        return sequence_like(value, [without_samples(item) for item in value])
    if is_dataclass(value):
        return dataclass_like(value, {name: without_samples(item) for name, item in fields_of(value)})
    return value


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of a dataclass's fields, as far as they are set."""
    named = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in named if hasattr(value, name)]


def dataclass_like(value: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a copy of a dataclass with other fields; a frozen one too, and without calling its constructor."""
    made = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def sequence_like(value: Any, items: list[Any]) -> Any:
    """Returns a tuple, named tuple or list of the same class with these items."""
    kind = type(value)
    if hasattr(kind, "_make"):
        return kind._make(items)
    try:
        return kind(items)
    except TypeError:  # a class of the user's own, with a constructor of its own
        return items if isinstance(value, list) else tuple(items)


def mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Returns a mapping of the same class with these items."""
    if type(value) is dict:
        return items
    if isinstance(value, MutableMapping):
        # It may know more than its items: a copy does, too.
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
