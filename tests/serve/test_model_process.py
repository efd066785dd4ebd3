"""The process of a model: numbered answers, failures that are told, deaths that are noticed, an end with its owner."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError, ReplicaDied, Stalled
from paceline.serve.answering import ProcessEnds
from paceline.serve.model_process import Answered, Died, Failed, ForkHere, ModelProcess, Ready, Starter
from paceline.serve.shared_values import NotSharable, SharedValues, StackedRows

LONG_S = 60.0


class Doubling(torch.nn.Module):
    def forward(self, x: Any, wait_s: float = 0.0) -> Any:
        if isinstance(x, str):
            raise ValueError(f"no {x}")
        time.sleep(wait_s)
        return {"twice": 2 * x, "grad": torch.is_grad_enabled(), "training": self.training}


@pytest.fixture
def process() -> Iterator[ModelProcess]:
    core = min(os.sched_getaffinity(0))
    with ModelProcess(ForkHere(Doubling), name="doubling", cores=[core]) as process:
        yield process


def next_event(process: ModelProcess) -> Any:
    (event,) = process.wait(LONG_S)
    return event


def test_it_answers_with_the_number_of_the_question_and_goes_on_after_a_failure(process: ModelProcess) -> None:
    assert isinstance(next_event(process), Ready)
    assert process.ready
    first = process.ask(torch.arange(6.0).view(2, 3))
    with pytest.raises(PacelineError, match="is at question 1"):
        process.ask(1)
    answer = next_event(process)
    assert isinstance(answer, Answered)
    assert answer.number == first == 1
    assert torch.equal(answer.value["twice"], torch.arange(6.0).view(2, 3) * 2)
    assert (answer.value["grad"], answer.value["training"]) == (False, False)
    second = process.ask("word")
    failure = next_event(process)
    assert isinstance(failure, Failed)
    assert (failure.number, failure.reason) == (second, "ValueError: no word")
    large = torch.rand(1 << 20)  # more than the memory had room for at first, both ways
    process.ask(x=large)
    assert torch.equal(next_event(process).value["twice"], 2 * large)
    assert psutil.Process(process.process).cpu_affinity() == list(process.cores)


def test_many_are_waited_for_at_once_and_nobody_has_to_look() -> None:
    processes = [ModelProcess(ForkHere(Doubling), name=str(number), torch_tensors=False) for number in range(3)]
    found: dict[str, Any] = {}
    with selectors.DefaultSelector() as selector:
        for number, process in enumerate(processes):
            selector.register(process, selectors.EVENT_READ)
            process.ask(np.full(4, number, dtype=np.int32))
        while len(found) < 3:
            for key, _ in selector.select(LONG_S):
                process = key.fileobj
                assert isinstance(process, ModelProcess)
                for event in process.events():
                    if isinstance(event, Answered):
                        found[process.name] = event.value["twice"]
        assert not selector.select(0)  # what was heard is not told again
    for number, process in enumerate(processes):
        assert found[str(number)].tolist() == [2 * number] * 4
        process.close()
        assert not psutil.pid_exists(process.process)


def test_a_killed_process_is_noticed_with_its_question_and_is_started_again(process: ModelProcess) -> None:
    next_event(process)
    descriptor, before = process.fileno(), process.process
    asked = process.ask(1, wait_s=1000.0)
    os.kill(before, signal.SIGKILL)
    assert next_event(process) == Died("it was killed by signal 9 (SIGKILL)", asked)
    assert not process.free
    with pytest.raises(ReplicaDied):
        process.wait(LONG_S)
    process.start_again()
    assert isinstance(next_event(process), Ready)
    assert (process.fileno(), process.starts) == (descriptor, 2)
    number = process.ask(21)
    answer = next_event(process)
    assert (answer.number, answer.value["twice"]) == (number, 42)
    assert number > asked


def test_an_answer_nobody_waited_for_is_not_that_to_a_later_question(process: ModelProcess) -> None:
    next_event(process)
    process.ask(1, wait_s=0.2)
    with pytest.raises(Stalled, match="doubling"):
        process.wait(0.001)
    assert not process.free  # the owner may have given up, but the process has not
    late = next_event(process)
    second = process.ask(2)
    assert (late.number, next_event(process).number) == (1, second)
    process.ask(3, wait_s=1000.0)
    process.start_again()  # what the killed one was asked is never answered
    assert isinstance(next_event(process), Ready)
    assert process.free


def test_a_model_that_cannot_be_made_says_why() -> None:
    def factory() -> Any:
        raise FileNotFoundError("no weights here")

    with ModelProcess(ForkHere(factory)) as process:
        assert next_event(process) == Died("FileNotFoundError: no weights here", None, broken=True)
    with ModelProcess(ForkHere(lambda: lambda: object())) as process:
        next_event(process)
        process.ask()
        assert "answers with a object" in next_event(process).reason


def test_it_ends_with_an_owner_that_is_killed_while_it_computes() -> None:
    """The owner forks it from a thread, so that the kernel's signal at a parent's death is not what ends it."""
    import threading

    read, write = os.pipe()
    owner = os.fork()
    if not owner:

        def own() -> None:
            process = ModelProcess(ForkHere(lambda: lambda: time.sleep(1000)))
            process.wait(LONG_S)
            process.ask()
            os.write(write, str(process.process).encode())

        thread = threading.Thread(target=own)
        thread.start()
        thread.join()
        signal.pause()
    model = psutil.Process(int(os.read(read, 100)))
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    assert not psutil.wait_procs([model], timeout=LONG_S)[1]
    os.close(read)
    os.close(write)


def test_it_holds_no_descriptor_of_its_owner(process: ModelProcess) -> None:
    """Else a port stays taken, and siblings live on, when their owner has gone."""
    read, write = os.pipe()
    with ModelProcess(ForkHere(Doubling)) as other:
        next_event(other)
        os.close(write)
        assert os.read(read, 1) == b""
    os.close(read)


def test_a_start_that_fails_leaves_no_descriptor_open() -> None:
    class Failing:
        def start(self, ends: ProcessEnds, cores: Sequence[int]) -> tuple[int, int]:
            raise BlockingIOError("no processes left")

    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(BlockingIOError, match="no processes left"):
            ModelProcess(Failing())
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_one_that_cannot_be_started_again_for_now_can_be_later(process: ModelProcess) -> None:
    class Once:
        def __init__(self, starter: Starter) -> None:
            self.starter, self.failed = starter, False

        def start(self, ends: ProcessEnds, cores: Sequence[int]) -> tuple[int, int]:
            self.failed = not self.failed
            if self.failed:
                raise BlockingIOError("no processes left")
            return self.starter.start(ends, cores)

    next_event(process)
    opened = len(os.listdir("/proc/self/fd"))
    process._starter = Once(process._starter)
    for _ in range(3):
        with pytest.raises(BlockingIOError, match="no processes left"):
            process.start_again()
        process.start_again()
        assert isinstance(next_event(process), Ready)
    assert len(os.listdir("/proc/self/fd")) == opened


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
dtypes = st.sampled_from(["float32", "float64", "float16", "bfloat16", "int64", "int8", "uint8", "bool", "complex64"])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return (torch.rand(shape) * 9).to(getattr(torch, draw(dtypes)))


values = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(st.lists(values, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_every_value_arrives_as_it_is(several: list[Any]) -> None:
    here = SharedValues.create()
    there = SharedValues(os.dup(here.descriptor))
    for value in several:
        assert same(value, there.read(here.write(value), torch_tensors=True))
    here.close()
    there.close()


def test_rows_arrive_as_one_array_and_what_cannot_travel_is_refused() -> None:
    memory = SharedValues.create()
    parts = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 3), np.float32)[:, ::-1]]
    arrived = memory.read(memory.write(StackedRows(parts)), torch_tensors=False)
    assert np.array_equal(arrived, np.concatenate(parts))
    halves = memory.read(memory.write(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)), torch_tensors=False)
    assert (halves.dtype, halves.tolist()) == (np.float32, [1.5, -2.0])
    for wrong in (object(), np.array(["text"]), torch.ones(2).to_sparse(), 2**70):
        with pytest.raises(NotSharable):
            memory.write([wrong])
    memory.close()
