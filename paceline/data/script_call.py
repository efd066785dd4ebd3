"""A call of `trainer.batches` or `trainer.evaluate` as one replica makes it, so that it can be compared with another's.

Every replica works out its samples alone, and the proof that each was counted once holds only if all have worked them
out alike. So whatever decides which samples are drawn and what becomes of them is compared before the first of them is:
between mirrored replicas by their engine, with servers by the chief, between the devices of a replica by the first one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from paceline.data.batch_values import leaves_in
from paceline.errors import DataError

_LOOKED_AT = 64  # samples of a dataset
_LOOKED_AT_BYTES = 4096  # of each
_LONGEST = 300  # characters of a description


class ScriptCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one replica has asked for."""

    who: str  # "replica 1"
    name: Literal["batches", "evaluate"]
    length: int | None  # None: a stream
    dataset: str
    number: int = 0  # of the script's calls of `batches`, from 1 on
    seed: int | str | None = None
    batch_size: int | None = None
    epochs: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    accumulate: int | None = None
    clip_norm: float | None = None
    scheduler: str | None = None
    metric: str | None = None

    def difference(self, other: ScriptCall) -> DataError | None:
        """Returns what is wrong with this call, if another replica has made another one.

        >>> mine = ScriptCall(who="replica 1", name="batches", length=8, dataset="", number=1, seed=1)
        >>> str(mine.difference(msgspec.structs.replace(mine, who="replica 0", seed=0)))
        "seed is 1: that is replica 1's in call 1 of trainer.batches, and replica 0's is 0; give all the same"
        """
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs and field != "who":
                return DataError(
                    "dataset length" if field == "length" else field,
                    mine,
                    f"that is {self.who}'s in {self._words}, and {other.who}'s is {theirs!r}; give all the same",
                )
        return None

    @property
    def _words(self) -> str:
        return f"call {self.number} of trainer.batches" if self.name == "batches" else "trainer.evaluate"


def describe_function(function: Any) -> str:
    """Returns which function of the script this is: its name, and where it stands.

    >>> describe_function(describe_function).partition(":")[0]
    'describe_function (script_call.py'
    """
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__qualname__
    return f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def describe(dataset: Any) -> str:
    """Returns what can be told of a dataset without loading samples, which may be others each time: what it is, and a
    checksum of some of its tensors' rows, of its indices, or of what it lists.

    >>> describe((torch.zeros(6, 2), torch.arange(6)))
    'float32[2], int64[] (checksum e9ba1137)'
    >>> describe(["a/1.png", "a/2.png"]) == describe(["b/1.png", "b/2.png"]), describe(["a/2.png", "a/1.png"])
    (True, 'list (checksum 0ddb17db)')
    """
    text = _described(dataset)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({zlib.crc32(text.encode()):08x})"


def _described(dataset: Any) -> str:
    if isinstance(dataset, Tensor):
        dataset = (dataset,)
    elif isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    elif isinstance(dataset, Mapping):
        dataset = tuple(dataset.values())
    if isinstance(dataset, (tuple, list)) and dataset and all(isinstance(item, Tensor) for item in dataset):
        rows = ", ".join(f"{str(item.dtype).removeprefix('torch.')}{list(item.shape[1:])}" for item in dataset)
        return f"{rows} (checksum {_checksum(dataset):08x})"
    kind = type(dataset).__qualname__
    if isinstance(dataset, Subset):
        looked_at = [dataset.indices[at] for at in _some(len(dataset.indices)).tolist()]
        return f"{kind} {zlib.crc32(repr(list(map(int, looked_at))).encode()):08x} of {_described(dataset.dataset)}"
    if isinstance(dataset, ConcatDataset):
        return f"{kind} of {', '.join(map(_described, dataset.datasets))}"
    found = 0
    for kept in (lists := _lists_of(dataset)):
        for at in _some(len(kept)).tolist():
            found = zlib.crc32(checksum_of(_without_folders(kept[at])).to_bytes(4, "little"), found)
    return f"{kind} (checksum {found:08x})" if lists else kind


def _lists_of(dataset: Any) -> list[Any]:
    """Returns what a dataset keeps of its samples, such as the names of their files: lists and arrays as long as it is.
    Each process may have put them into an order of its own."""
    kinds = (list, tuple, np.ndarray, Tensor)
    if isinstance(dataset, kinds):
        return [dataset]
    kept = [value for _, value in sorted(vars(dataset).items())] if hasattr(dataset, "__dict__") else []
    kept = [value for value in kept if isinstance(value, kinds) and getattr(value, "shape", None) != ()]
    return [value for value in kept if len(value) == len(dataset)]


def _without_folders(sample: Any) -> list[Any]:
    """Returns what a sample holds; of names of files the last part, since hosts may have them in different places."""
    leaves = leaves_in(sample)
    return [os.path.basename(leaf) if isinstance(leaf, (str, os.PathLike)) else leaf for leaf in leaves]


def _checksum(tensors: list[Tensor] | tuple[Tensor, ...]) -> int:
    """Of a few rows of each."""
    found = 0
    for tensor in tensors:
        if tensor.dim() and tensor.layout == torch.strided:
            rows = tensor.detach()[_some(len(tensor)).to(tensor.device)].flatten(1 if tensor.dim() > 1 else 0)
            most = max(1, _LOOKED_AT_BYTES // tensor.element_size())
            found = zlib.crc32(rows[..., :most].cpu().contiguous().view(torch.uint8).numpy().data, found)
    return found


def checksum_of(sample: Any) -> int:
    """Returns one of the beginnings of what a sample holds; of a value of which nothing is known, of its class.

    >>> one, other = {"x": torch.ones(2), "name": "a"}, {"x": torch.ones(2), "name": "b"}
    >>> checksum_of(one) == checksum_of(dict(one)), checksum_of(one) == checksum_of(other)
    (True, False)
    """
    found = 0
    for leaf in leaves_in(sample):
        value = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf
        if isinstance(value, Tensor) and value.layout == torch.strided:
            found = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode(), found)
            most = max(1, _LOOKED_AT_BYTES // value.element_size())
            data = value.detach().reshape(-1)[:most].cpu().contiguous().view(torch.uint8)
            found = zlib.crc32(data.numpy().tobytes(), found)
        else:
            plain = isinstance(value, (str, bytes, int, float, complex, np.generic, type(None)))
            text = repr(value) if plain else type(value).__qualname__
            found = zlib.crc32(text.encode(errors="backslashreplace"), found)
    return found


def _some(length: int) -> Tensor:
    """Returns a few numbers below `length`, spread evenly, the first and the last among them."""
    return torch.linspace(0, max(0, length - 1), min(length, _LOOKED_AT), dtype=torch.float64).round().long()
