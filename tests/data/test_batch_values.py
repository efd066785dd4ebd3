"""A batch of any class keeps its class and what else it knows, whatever is done to its tensors."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.data import Ledger, open_feed
from paceline.data.batch_values import map_tensors, tensors_in, without_samples
from paceline.data.collate import collate_samples


class Encoding(UserDict[str, Any]):
    """As a tokenizer returns it: a mapping that knows more, and whose constructor wants it."""

    def __init__(self, data: dict[str, Any], encoder: str) -> None:
        super().__init__(data)
        self.encoder = encoder


class Output(OrderedDict[str, Any]):
    """As a model returns it: its items are its attributes, and `update` is not allowed."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise RuntimeError("not allowed")


class ReadOnly(Mapping[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    label: int = 0
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Sample
    name: str
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        raise_unless = isinstance(self.name, str)
        assert raise_unless, "a constructor was called on what it does not want"


def rows(count: int) -> Tensor:
    return torch.arange(2.0 * count).view(count, 2)


def output() -> Output:
    made = Output()
    made["loss"], made["logits"] = torch.tensor(1.0), rows(1)
    return made


BATCHES = {
    "tensor": lambda: rows(1),
    "tuple": lambda: (rows(1), [rows(1)]),
    "named tuple": lambda: Pair(rows(1), rows(1)),
    "dict": lambda: {"x": rows(1), "scale": 2},
    "defaultdict": lambda: defaultdict(list, x=rows(1)),
    "encoding": lambda: Encoding({"input_ids": rows(1), "text": ["a"]}, "fast"),
    "model output": output,
    "read only": lambda: ReadOnly({"x": rows(1)}),
    "proxy": lambda: MappingProxyType({"x": rows(1)}),
    "dataclass": lambda: Sample(rows(1)),
    "frozen": lambda: Frozen(Sample(rows(1), mask=rows(1)), "a"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_any_class_without_samples_is_of_that_class(name: str) -> None:
    batch = BATCHES[name]()
    empty = without_samples(batch)
    assert type(empty) is type(batch)
    before, after = ([leaf for leaf in tensors_in(value) if leaf is not None] for value in (batch, empty))
    assert [tuple(leaf.shape) for leaf in before if leaf.dim()] == [(1, 2)] * len([x for x in before if x.dim()])
    assert [tuple(leaf.shape) for leaf in after if leaf.dim()] == [(0, 2)] * len([x for x in before if x.dim()])
    twice = map_tensors(lambda leaf: leaf * 2, batch)
    assert type(twice) is type(batch)
    assert [leaf.tolist() for leaf in tensors_in(twice) if leaf is not None] == [(x * 2).tolist() for x in before]


def test_what_else_a_batch_knows_stays() -> None:
    empty = without_samples(BATCHES["encoding"]())
    assert (empty.encoder, empty["text"]) == ("fast", [])
    empty = without_samples(BATCHES["model output"]())
    assert empty.logits is empty["logits"]
    assert empty.loss == 1


def test_dataclasses_are_collated_field_by_field_wherever_they_are() -> None:
    samples = [
        {"one": Frozen(Sample(rows(1)[0] + at, at), f"n{at}"), "two": (Sample(rows(1)[0], -at, rows(1)[0]), at)}
        for at in range(3)
    ]
    batch = collate_samples(samples)
    one, (two, numbers) = batch["one"], batch["two"]
    assert (type(one), type(one.inner), type(two)) == (Frozen, Sample, Sample)
    assert one.inner.x.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert (one.inner.label.tolist(), one.inner.mask, one.name) == ([0, 1, 2], None, ["n0", "n1", "n2"])
    assert (two.label.tolist(), two.mask.shape, numbers.tolist()) == ([0, -1, -2], (3, 2), [0, 1, 2])
    assert samples[0]["one"].inner.label == 0  # type: ignore[union-attr]


def test_nothing_is_registered_for_the_whole_process() -> None:
    from torch.utils.data import default_collate

    collate_samples([Sample(rows(1))])
    with pytest.raises(TypeError):
        default_collate([Sample(rows(1))])


def test_mappings_and_named_tuples_of_tensors_are_datasets() -> None:
    ledger = Ledger(5, 2, shuffle=False)
    for dataset in (
        {"x": rows(5), "y": torch.arange(5)},
        Encoding({"x": rows(5), "y": torch.arange(5)}, "fast"),
        Pair(rows(5), torch.arange(5)),
    ):
        batch = open_feed(dataset).load(ledger, 0, range(1, 3))
        assert type(batch) is type(dataset)
        x, y = (leaf for leaf in tensors_in(batch) if leaf is not None)
        assert (x.tolist(), y.tolist()) == ([[2, 3], [4, 5]], [1, 2])
    feed = open_feed({"x": rows(5)}, lambda samples: [sample["x"][0].item() for sample in samples])
    assert feed.load(ledger, 0, range(1, 3)) == [2, 4]
