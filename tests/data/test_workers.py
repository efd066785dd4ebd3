"""Workers load the same samples as one process does; whatever goes wrong in one is told, and none stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from paceline.data import Feed, Ledger, open_feed
from paceline.data.samples_message import pack, unpack
from paceline.errors import DataError, PacelineError


class Photos:
    """Samples that draw from every generator, and tell who has loaded them."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        return {"index": index, "drawn": drawn, "array": np.full((3,), index), "process": os.getpid()}


def drawn(feed: Feed, ledger: Ledger, epoch: int = 0) -> list[list[float]]:
    """In parts of five, as a replica's are."""
    with feed:
        parts = [feed.load(ledger, epoch, range(at, at + 5)) for at in range(0, 40, 5)]
    return [row for part in parts for row in part["drawn"].tolist()]


def test_samples_and_what_they_draw_do_not_depend_on_the_number_of_workers_or_the_parts() -> None:
    ledger = Ledger(40, 10, seed=3)
    one, three = drawn(open_feed(Photos(), workers=1), ledger), drawn(open_feed(Photos(), workers=3), ledger)
    assert one == three
    with open_feed(Photos(), workers=2) as feed:
        whole = feed.load(ledger, 0, range(40))
    assert whole["drawn"].tolist() == one
    assert whole["index"].tolist() == ledger.indices(0, range(40)).tolist()
    assert whole["array"][:, 0].tolist() == whole["index"].tolist()
    assert len(set(whole["process"].tolist())) == 2
    assert os.getpid() not in whole["process"]
    assert len({tuple(row) for row in one}) == 40
    assert drawn(open_feed(Photos(), workers=2), ledger, epoch=1) != one
    assert drawn(open_feed(Photos(), workers=2), Ledger(40, 10, seed=4)) != one


def test_a_collate_of_ones_own_runs_in_a_worker_with_a_seed_of_its_own() -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"sum": sum(sample["drawn"].sum() for sample in samples), "rand": torch.rand(2), "by": os.getpid()}

    found = []
    for workers in (1, 3):
        with open_feed(Photos(), collate, workers) as feed:
            found.append([feed.load(Ledger(40, 10), 0, range(at, at + 10)) for at in (0, 10)])
    (one, other), again = found
    assert [batch["sum"] for batch in (one, other)] == [batch["sum"] for batch in again]
    assert one["rand"].tolist() == again[0]["rand"].tolist() != other["rand"].tolist()
    assert one["by"] != os.getpid()


class Many(Photos):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"index": index, "at once": len(indices)} for index in indices]


def test_a_dataset_that_gives_many_at_once_is_asked_once_a_worker() -> None:
    with open_feed(Many(), workers=2) as feed:
        batch = feed.load(Ledger(40, 10, shuffle=False), 0, range(10))
    assert batch["index"].tolist() == list(range(10))
    assert batch["at once"].tolist() == [5] * 10


class Broken(Photos):
    def __getitem__(self, index: int) -> Any:
        if index in (7, 12):
            raise KeyError(f"photo {index}")
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 21:
            raise Picky(1, 2)
        return index


class Picky(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def notes_of(error: BaseException) -> list[str]:
    """Python 3.10 has none."""
    return getattr(error, "__notes__", ["(sample 7 of the dataset)"])


def test_an_error_arrives_with_its_traceback_and_the_index_and_workers_live_on() -> None:
    ledger = Ledger(40, 10, shuffle=False)
    with open_feed(Broken(), workers=2) as feed:
        for _ in range(3):
            with pytest.raises(KeyError, match="photo 7") as caught:
                feed.load(ledger, 0, range(15))
            told = "".join(traceback.format_exception(caught.value))
            assert "sample 7, in worker" in told
            assert 'raise KeyError(f"photo {index}")' in told
            assert notes_of(caught.value) == ["(sample 7 of the dataset)"]
        assert feed.load(ledger, 0, range(5)).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(PacelineError, match=r"sample 21 cannot be loaded: .*Picky: 1 and 2"):
            feed.load(ledger, 0, range(21, 22))


def test_the_index_is_told_without_workers_too() -> None:
    with pytest.raises(KeyError) as caught:
        open_feed(Broken()).load(Ledger(40, 10, shuffle=False), 0, range(10))
    assert notes_of(caught.value) == ["(sample 7 of the dataset)"]


def workers_here() -> list[psutil.Process]:
    """The children of this process, but for those that runs of other tests are forked from."""
    return [child for child in psutil.Process().children() if "run_template_process" not in " ".join(child.cmdline())]


def test_a_worker_that_is_killed_is_told_at_once_in_a_sentence() -> None:
    began = time.monotonic()
    with open_feed(Broken(), workers=2) as feed:
        with pytest.raises(PacelineError) as caught:
            feed.load(Ledger(40, 10, shuffle=False), 0, range(20, 21))
        assert str(caught.value) == (
            "worker 0 of the 2 of the dataset was killed by signal 9 (SIGKILL) while it loaded samples 20 (that is "
            "what happens where memory runs out)"
        )
        with pytest.raises(PacelineError, match="have ended"):
            feed.load(Ledger(40, 10), 0, range(5))
    assert time.monotonic() - began < 20
    assert not workers_here()


def test_a_worker_that_is_killed_while_it_waits_is_told_with_the_next_batch() -> None:
    with open_feed(Photos(), workers=2) as feed:
        feed.load(Ledger(40, 10), 0, range(5))
        workers_here()[0].kill()
        with pytest.raises(PacelineError, match=r"killed by signal 9"):
            feed.load(Ledger(40, 10), 0, range(5))


class Slow(Photos):
    def __getitem__(self, index: int) -> Any:
        time.sleep(100)


def test_a_sample_that_nobody_waits_for_does_not_hold_up_the_end() -> None:
    from paceline.data import Ahead

    ledger, began = Ledger(40, 10), time.monotonic()
    with open_feed(Slow(), workers=2) as feed:
        ahead = Ahead(feed, ledger)
        ahead.want([(0, (range(4),))])
        time.sleep(0.2)
        ahead.close()
    assert time.monotonic() - began < 50  # a sample takes 100
    assert not workers_here()


def test_workers_end_with_a_process_that_is_killed() -> None:
    script = textwrap.dedent("""
        import os, signal, sys, threading, time, psutil
        from paceline.data import Ledger, open_feed
        class Slow:
            def __len__(self): return 40
            def __getitem__(self, index): time.sleep(100)
        feed = open_feed(Slow(), workers=3).__enter__()
        threading.Thread(target=lambda: feed.load(Ledger(40, 10), 0, range(10)), daemon=True).start()
        time.sleep(0.3)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    workers = list(map(int, result.stdout.split()))
    assert len(workers) == 3
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in workers):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_workers_know_that_they_are_and_begin_as_the_user_says() -> None:
    class Told(Photos):
        begun = -1

        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            return info.id, info.num_workers, self.begun

    dataset = Told()

    def begin(number: int) -> None:
        dataset.begun = number

    with open_feed(dataset, workers=2, begin_worker=begin) as feed:
        numbers, counts, begun = feed.load(Ledger(40, 10), 0, range(40))
    assert numbers.tolist() == begun.tolist()
    assert set(numbers.tolist()) == {0, 1}
    assert set(counts.tolist()) == {2}
    assert torch.utils.data.get_worker_info() is None
    assert dataset.begun == -1

    def fails(number: int) -> None:
        raise OSError("no such disk")

    with open_feed(dataset, workers=2, begin_worker=fails) as feed, pytest.raises(OSError, match="no such disk"):
        feed.load(Ledger(40, 10), 0, range(5))


@pytest.mark.parametrize("count", [-1, 2.5])
def test_a_number_of_workers_that_makes_no_sense_is_refused(count: Any) -> None:
    with pytest.raises(DataError, match="give a whole number of processes from 0 up"):
        open_feed(Photos(), workers=count)


@dataclass
class Everything:
    tensors: list[torch.Tensor]
    more: Any


def test_samples_of_any_class_arrive_as_they_were() -> None:
    table = torch.arange(12.0).view(3, 4)
    tensors = [
        table.t(),
        table[1],
        torch.tensor(5, dtype=torch.int16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3).bfloat16(),
        torch.zeros(0, 4),
        torch.randn(2, 2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
    ]
    value = Everything(tensors, UserDict(a=np.arange(5), b=np.zeros((0, 3)), c="text", d={1, 2}, e=table))
    found = unpack([memoryview(bytearray(part)) for part in pack(value)])
    assert type(found) is Everything
    for before, after in zip(tensors, found.tensors, strict=True):
        assert (before.dtype, before.shape, before.layout, before.requires_grad) == (
            after.dtype,
            after.shape,
            after.layout,
            after.requires_grad,
        )
        assert torch.equal(before.detach().to_dense(), after.detach().to_dense())
        if not after.requires_grad and after.layout == torch.strided:
            after.add_(1) if after.dtype != torch.bool else after.zero_()
    assert found.more["a"].tolist() == [0, 1, 2, 3, 4]
    assert (found.more["b"].shape, found.more["c"], found.more["d"]) == ((0, 3), "text", {1, 2})
    assert sum(map(len, pack(table[1]))) < 300
