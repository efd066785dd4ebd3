"""A batch of a list of samples, as torch's DataLoader makes it, and of dataclasses too.

torch collates tensors, numbers, tuples, named tuples and mappings. Of dataclasses it knows nothing unless they are
registered, for the whole process and one by one: here each is collated field by field, and nothing is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import default_collate

from paceline.data.batch_values import dataclass_like, fields_of, is_dataclass
from paceline.torch_private import collate_by, collate_functions

Collate = Callable[[list[Any]], Any]


def collate_samples(samples: list[Any]) -> Any:
    """Returns the batch; a dataclass's field that is None in all samples stays None."""
    kinds = set(_dataclasses_in(samples[0]))
    if not kinds:
        return default_collate(samples)
    return collate_by(samples, collate_fn_map={**dict.fromkeys(kinds, _collate_dataclass), **collate_functions})


def _dataclasses_in(value: Any) -> Iterator[type]:
    if is_dataclass(value) and not isinstance(value, Mapping):
        yield type(value)
        inner = [item for _, item in fields_of(value)]
    elif isinstance(value, Mapping):
        inner = list(value.values())
    else:
        inner = list(value) if isinstance(value, (tuple, list)) else []
    for item in inner:
        yield from _dataclasses_in(item)


def _collate_dataclass(samples: list[Any], *, collate_fn_map: dict[Any, Any]) -> Any:
    first, fields = samples[0], {}
    for name, item in fields_of(first):
        column = [getattr(sample, name) for sample in samples]
        nothing = item is None and all(value is None for value in column)
        # A nested one may be of a class that is not in the first sample's other fields.
        fields[name] = None if nothing else collate_by(column, collate_fn_map=collate_fn_map)
    return dataclass_like(first, fields)
