"""A cut model on one machine: every device of it computes for real, by itself, and the times are put together.

    device 0   ███ ─send─┐      ▒▒▒▒ ████          ▒ waits
    device 1   ▒▒▒▒▒▒▒▒▒▒└─█████ ─send─┘

First all devices make a step together, as threads of this process of which one runs at a time, by the product's own
code. What each receives is recorded. Then each makes that step again, alone, with what it had received: on one core,
while neighbours do the same, as long as each stretch between two messages takes. Put together (`play`),
with every message as late as it was sent, this is the step that as many devices would take. Whatever the cut does, a
pipeline's order, a wave's, halos, sums, is in it, and nothing about it has to be written down a second time.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.exchange.mailboxes import DeviceGroup, Peers
from paceline.loss_value import Weight
from paceline.optim.direct_gradients import as_in_a_step
from paceline.optim.models import own_state
from paceline.profile.neighbours import busy_neighbours
from paceline.profile.step_times import StepWork, timing, undisturbed
from paceline.profile.values import CutTrial
from paceline.split.cut import Cut, TensorPart, open_cut
from paceline.split.stages.micro_batches import length_of
from paceline.split.values import Split

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 8


class _Abandoned(Exception):
    """Another device has failed."""


class _Turns:
    """Who may run: one device at a time."""

    def __init__(self) -> None:
        self.may_run = threading.Condition()
        self.running: int | None = None
        self.failed: BaseException | None = None
        self.told: list[list[int]] = []


class VirtualPeers(Peers):
    """The devices of a replica, as one of them sees them: threads of this process."""

    def __init__(self, turns: _Turns, everybody: list[VirtualPeers], rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._turns, self._everybody = turns, everybody
        self._boxes: dict[int, deque[torch.Tensor]] = {other: deque() for other in range(count)}
        self._told = 0
        self.messages: list[Message] = []  # of the step, in this device's order
        self._received: list[torch.Tensor] = []
        self._replayed: int | None = None  # how many were taken from the record; None: it is being made
        self.stretches: list[float] = []  # of a step that is made again, between messages
        self._mark = 0.0

    def while_waiting(self, act: Callable[[], bool]) -> None:
        """A device that makes its step alone never waits: what it would do then it does at the end."""

    def record(self) -> None:
        """What follows is the step that is recorded."""
        self.messages, self._received, self._replayed = [], [], None

    def replay(self, step: Callable[[], None]) -> list[float]:
        """Makes the recorded step again, alone. Returns how long every stretch between messages took."""
        self._replayed, self.stretches, self._mark = 0, [], time.perf_counter()
        step()
        self._stretch()
        return self.stretches

    def _stretch(self) -> None:
        now = time.perf_counter()
        self.stretches.append(now - self._mark)
        self._mark = now

    # ── taking turns ─────────────────────────────────────────────────────────────────────────────────────

    def take_turn(self) -> None:
        turns = self._turns
        with turns.may_run:
            turns.may_run.wait_for(lambda: turns.running is None or turns.failed is not None)
            if turns.failed is not None:
                raise _Abandoned
            turns.running = self.rank

    def give_turn(self) -> None:
        turns = self._turns
        with turns.may_run:
            if turns.running == self.rank:
                turns.running = None
            turns.may_run.notify_all()

    def _until(self, ready: Callable[[], bool]) -> None:
        """Lets others run until it is so."""
        turns = self._turns
        with turns.may_run:
            turns.running = None
            turns.may_run.notify_all()
            if not turns.may_run.wait_for(
                lambda: turns.failed is not None or (turns.running is None and ready()), timeout=60
            ):
                turns.failed = turns.failed or TimeoutError("a device waits for another that sends nothing")
            if turns.failed is not None:
                raise _Abandoned
            turns.running = self.rank

    # ── what devices do ──────────────────────────────────────────────────────────────────────────────────

    def send(self, tensor: torch.Tensor, to: int) -> None:
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self._replayed is not None:
            self._stretch()
            return
        self.messages.append(Message(to, sent=True, bytes=copied.nbytes))
        self._everybody[to]._boxes[self.rank].append(copied)

    def receive(self, source: int) -> torch.Tensor:
        if self._replayed is not None:
            self._stretch()
            self._replayed += 1
            return self._received[self._replayed - 1].clone()
        box = self._boxes[source]
        if not box:
            self._until(lambda: bool(box))
        self._received.append(box.popleft())
        self.messages.append(Message(source, sent=False, bytes=self._received[-1].nbytes))
        return self._received[-1].clone()

    def along(self, ranks: Sequence[int]) -> DeviceGroup:
        return DeviceGroup(self, tuple(ranks))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def tell_all(self, numbers: Sequence[int] | None = None) -> list[int]:
        told = self._turns.told
        if self.first:
            assert numbers is not None
            told.append(list(numbers))
        elif len(told) <= self._told:
            self._until(lambda: len(told) > self._told)
        self._told += 1
        return list(told[self._told - 1])

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Message:
    """A tensor that a device has sent to another, or received from it."""

    other: int
    sent: bool
    bytes: int


def play(messages: Sequence[Sequence[Message]], stretches: Sequence[Sequence[float]], latency_s: float) -> float:
    """Returns how long a step of all devices takes: by device its messages, and the stretches between them.

    >>> there = [Message(1, True, 4)], [Message(0, False, 4)]
    >>> play(there, [[1.0, 0.5], [0.2, 2.0]], latency_s=0.1)
    3.1
    """
    clocks = [0.0] * len(messages)
    at = [0] * len(messages)
    arriving: dict[tuple[int, int], deque[float]] = {}
    moved = True
    while moved:
        moved = False
        for device, own in enumerate(messages):
            while at[device] < len(own):
                message, ready = own[at[device]], clocks[device] + stretches[device][at[device]]
                if message.sent:
                    arriving.setdefault((device, message.other), deque()).append(ready + latency_s)
                elif box := arriving.get((message.other, device)):
                    ready = max(ready, box.popleft())
                else:
                    break
                clocks[device] = ready
                at[device] += 1
                moved = True
    return max(clock + last[-1] for clock, last in zip(clocks, stretches, strict=True))


def try_cut(
    work: StepWork,
    split: Split,
    samples: int,
    dims: Mapping[str, str],
    latency_s: float,
    cores: Sequence[int],
    until: float,
) -> CutTrial:
    """Returns what a replica of so many samples takes if it is cut like this; or why it cannot be."""
    batch = work.part(samples)
    try:
        devices = _Devices(work, split, dims)
        devices.all_do(lambda device: device.prepare(batch))
        devices.all_do(lambda device: device.step(batch))
        for device in devices.all:
            device.peers.record()
        devices.all_do(lambda device: device.step(batch))
        rounds = devices.replayed(batch, cores, until)
    except Exception as error:  # whatever a model does under a cut that is only tried is an answer
        return CutTrial(split=split, samples=samples, why_not=str(error).strip().split("\n")[0][:300] or repr(error))
    messages = [device.peers.messages for device in devices.all]
    lasted = [play(messages, stretches, latency_s) for stretches in zip(*rounds, strict=True)]
    received = [[message.bytes for message in own if not message.sent] for own in messages]
    return CutTrial(
        split=split,
        samples=samples,
        timing=timing(lasted),
        busiest_s=max(undisturbed([sum(stretches) for stretches in of_device]) for of_device in rounds),
        messages=max(map(len, received)),
        bytes=max(map(sum, received)),
        parameter_bytes=max(device.parameter_bytes for device in devices.all),
    )


class _VirtualDevice:
    """One device: its peers, its cut, its own copy of the model on the same parameters."""

    def __init__(self, work: StepWork, peers: VirtualPeers, split: Split, dims: Mapping[str, str]) -> None:
        self.peers = peers
        same = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in own_state(work.model).parameters()}
        self._model: nn.Module = copy.deepcopy(own_state(work.model), dict[int, Any](same))
        self._work = work
        self.cut: Cut = open_cut(split, peers, dims)
        self._parts: list[torch.Tensor] = []
        self.parameter_bytes = 0

    def prepare(self, batch: Any) -> None:
        self.cut.prepare(self._work.loss, self._model, batch)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            part = self.cut.part_of(name)
            tensors[name] = _part_of(part, parameter)
        for name, buffer in self._model.named_buffers():
            part = self.cut.part_of(name)
            tensors[name] = part.of(buffer.data).clone() if part.index else buffer
        self._parts = [tensor for tensor in tensors.values() if tensor.requires_grad]
        self.cut.take(tensors)

    def step(self, batch: Any) -> None:
        with as_in_a_step():
            self.cut.train(self._work.loss, self._model, batch, Weight.whole(length_of(batch)), self._work.check)
        self.parameter_bytes = sum(tensor.nbytes for tensor in self._parts if tensor.grad is not None)
        for tensor in (*self._parts, *self._model.parameters()):
            tensor.grad = None


def _part_of(part: TensorPart, parameter: nn.Parameter) -> torch.Tensor:
    if not part.index:
        return parameter
    made = nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad)
    made.data = part.of(parameter.data)
    return made


class _Devices:
    """All devices of a replica."""

    def __init__(self, work: StepWork, split: Split, dims: Mapping[str, str]) -> None:
        self._turns = _Turns()
        peers: list[VirtualPeers] = []
        for rank in range(split.devices):
            peers.append(VirtualPeers(self._turns, peers, rank, split.devices))
        self.all = [_VirtualDevice(work, own, split, dims) for own in peers]

    def all_do(self, act: Callable[[_VirtualDevice], None]) -> None:
        """Has every device do something, in threads that take turns."""
        threads = [threading.Thread(target=self._run, args=(device, act), daemon=True) for device in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed, self._turns.failed = self._turns.failed, None
        if failed is not None:
            raise failed

    def replayed(self, batch: Any, cores: Sequence[int], until: float) -> list[list[list[float]]]:
        """Returns by device and round the stretches of a step, each on one core beside others that do the same."""
        found = []
        for number, device in enumerate(self.all):
            other = self.all[(number + 1) % len(self.all)]
            step, others = partial(device.step, batch), partial(other.step, batch)
            rounds: list[list[float]] = []
            with busy_neighbours(partial(other.peers.replay, others), cores[1 : len(self.all)]):
                device.peers.replay(step)  # memory that neighbours were made with is this process's own again
                while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.monotonic() < until):
                    rounds.append(device.peers.replay(step))
            found.append(rounds)
        fewest = min(map(len, found))
        return [rounds[:fewest] for rounds in found]

    def _run(self, device: _VirtualDevice, act: Callable[[_VirtualDevice], None]) -> None:
        torch.set_num_threads(1)  # a thread of its own begins with as many as there are cores
        try:
            device.peers.take_turn()
            act(device)
        except _Abandoned:
            pass
        except BaseException as error:
            with self._turns.may_run:
                self._turns.failed = self._turns.failed or error
        finally:
            device.peers.give_turn()
