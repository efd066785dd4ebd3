"""A request on its way to the other devices: how the arguments of a call are put together, and their tensors beside it.

Fixed kinds, no pickle: tensors, numbers, text, None, and lists, tuples and dicts of them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from paceline.errors import PacelineError

Call = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _VALUE, _LIST, _TUPLE, _DICT = range(5)


def encode(call: Call) -> tuple[bytes, list[torch.Tensor]]:
    """
    >>> text, tensors = encode(((torch.ones(2), [1, None]), {"scale": 0.5}))
    >>> decode(text, tensors)
    ((tensor([1., 1.]), [1, None]), {'scale': 0.5})
    """
    tensors: list[torch.Tensor] = []

    def form(value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return [_TENSOR, len(tensors) - 1]
        if kind in _PLAIN:
            return [_VALUE, value]
        if kind in (list, tuple):
            return [_LIST if kind is list else _TUPLE, [form(entry) for entry in value]]
        if kind is dict:
            return [_DICT, [[form(key), form(entry)] for key, entry in value.items()]]
        raise PacelineError(
            f"a request has a {kind.__name__}: it may be made of tensors, numbers, text, None, lists, tuples and dicts"
        )

    try:
        return msgspec.msgpack.encode(form(call)), tensors
    except OverflowError as error:
        raise PacelineError(f"a request has a number that is too large ({error}): give one of 64 bits") from error


def decode(text: bytes, tensors: list[torch.Tensor]) -> Call:
    def value(form: Any) -> Any:
        kind, of = form
        if kind == _TENSOR:
            return tensors[of]
        if kind == _VALUE:
            return of
        if kind == _DICT:
            return {value(key): value(entry) for key, entry in of}
        entries = [value(entry) for entry in of]
        return entries if kind == _LIST else tuple(entries)

    call: Call = value(msgspec.msgpack.decode(text))
    return call
