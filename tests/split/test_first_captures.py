"""The first device captures what can be kept and the others find it; what it cannot keep, or fails at, all capture."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
from devices import on_devices
from torch import nn

from paceline.cache_folder import CACHE
from paceline.exchange.mailboxes import Peers
from paceline.split.first_captures import FirstCaptures
from paceline.split.stages.cut import StagesCut
from paceline.split.values import Stages

DEVICES = 3


class Cache:
    """Where a graph is kept or not, and who has captured it."""

    def __init__(self, *, keeps: bool = True, known: bool = True, fails: bool = False) -> None:
        self.keeps, self.known, self.fails = keeps, known, fails
        self.is_there = False
        self.captured: list[int] = []
        self.proven: list[str] = []  # what was told to the others
        self.capturing = threading.Barrier(DEVICES)

    def prepare(self, peers: Peers) -> None:
        with contextlib.suppress(ValueError), FirstCaptures(peers) as first:
            if peers.rank != 0:
                self.proven.append(first.proven)
            if not self.is_there:
                first.begin(self.known)
                self._capture(peers.rank)
            first.proven = "the entry" if self.is_there else ""

    def _capture(self, rank: int) -> None:
        if not self.known:
            self.capturing.wait(timeout=10)  # all at the same time
        time.sleep(0.05)
        self.captured.append(rank)
        if self.fails:
            raise ValueError("cannot be cut")
        self.is_there = self.keeps


def test_one_captures_and_the_others_find_it_also_the_next() -> None:
    caches = [Cache(), Cache()]
    on_devices(DEVICES, lambda peers: [cache.prepare(peers) for cache in caches])
    assert [cache.captured for cache in caches] == [[0], [0]]
    assert [cache.proven for cache in caches] == [["the entry"] * 2] * 2


def test_what_is_there_nobody_captures() -> None:
    cache = Cache()
    cache.is_there = True
    on_devices(DEVICES, cache.prepare)
    assert cache.captured == []
    assert cache.proven == ["the entry"] * 2


def test_what_has_no_key_all_capture_at_the_same_time() -> None:
    cache = Cache(known=False)
    on_devices(DEVICES, cache.prepare)
    assert sorted(cache.captured) == [0, 1, 2]


def test_what_could_not_be_kept_or_captured_the_others_see_for_themselves() -> None:
    for cache in (Cache(keeps=False), Cache(fails=True)):
        on_devices(DEVICES, cache.prepare)
        assert cache.captured[0] == 0
        assert sorted(cache.captured) == [0, 1, 2]
        assert "the entry" not in cache.proven


class Counting(nn.Module):
    """It does something that is no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


def squared(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_effects_of_python_are_told_also_of_a_graph_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))

    def prepare(peers: Peers) -> None:
        StagesCut(Stages(stages=1, micro_batches=1), peers).prepare(squared, Counting(), torch.ones(2, 3))

    for _ in range(2):
        with pytest.warns(UserWarning, match="it changes calls of the model: once a graph, not in every step"):
            on_devices(1, prepare)
    (entry,) = tmp_path.rglob("*.graph")
    assert entry.stat().st_size > 100
