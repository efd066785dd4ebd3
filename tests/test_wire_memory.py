"""What a lossy wire owes when a step is tried again, when hosts are gone, and when one is left alone.

All that hosts have given arrives sooner or later: what has been delivered, and what those owe who are there, and what
those owed who are gone, come to the sum of everything, to the rounding. Hosts are threads, links are queues.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import nn

from paceline.exchange.coded_sums import Round
from paceline.exchange.links import Links
from paceline.memory.model_arena import ForHosts, ModelArena, Sizes
from paceline.mirrored.wire_memory import WireMemory
from paceline.optim.model_in_arena import ModelInArena

Queues = dict[tuple[int, int, int], "queue.SimpleQueue[torch.Tensor]"]


class Queued:
    """One host's links, as far as sums use them."""

    def __init__(self, host: int, hosts: int, queues: Queues) -> None:
        self.host, self.hosts, self._queues = host, hosts, queues

    def exchange(self, one_round: Round, tag: int) -> None:
        others = [host for host in range(self.hosts) if host != self.host]
        for other in others:
            self._queue(self.host, other, tag).put(one_round.sent[other].clone())
        for other in others:
            one_round.received[other].copy_(self._queue(other, self.host, tag).get(timeout=20))

    def _queue(self, *key: int) -> queue.SimpleQueue[torch.Tensor]:
        """The same for both ends, whichever comes first: a defaultdict may make one for each."""
        source, target, tag = key
        return self._queues.setdefault((source, target, tag), queue.SimpleQueue())


class Hosts:
    """Wires of several hosts, of a model with a matrix and a few other values."""

    def __init__(self, wire: str, count: int) -> None:
        model = nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 3))
        made = ModelInArena(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, whole_tensors=True)
        (chunk,) = made.layout.chunks
        self.elements, self.slots = chunk.bytes // 4, made.layout.slots
        self.memories = [WireMemory(wire, "gradient") for _ in range(count)]
        owed, bases = self.memories[0].floats(made.layout)
        sizes = Sizes(1, (0,), 64, 0, ForHosts(sums=True, owed_floats=owed, bases_floats=bases))
        self.arenas = [ModelArena.private(made.layout, sizes, torch.device("cpu")) for _ in range(count)]
        for memory, arena in zip(self.memories, self.arenas, strict=True):
            memory.open(arena)
        self.turns = 0

    def meet(self, those: Sequence[int]) -> None:
        """From now on these take part, in a new view."""
        self.those, queues = those, cast(Queues, {})
        for index, host in enumerate(those):
            links = cast(Links, Queued(index, len(those), queues)) if len(those) > 1 else None
            self.memories[host].connect(links)

    def sum(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what all get for what each of them gives."""
        values = [given[host].clone() for host in self.those]
        with ThreadPoolExecutor(len(values)) as threads:
            for done in [
                threads.submit(self.memories[host].sum, 0, own) for host, own in zip(self.those, values, strict=True)
            ]:
                done.result()
        assert all(torch.equal(values[0], other) for other in values)
        return values[0]

    def commit(self, touched: Sequence[int] = (1, 1, 1, 1)) -> None:
        """`touched`: by slot, whether anybody has used it."""
        self.turns += 1
        for host in self.those:
            self.memories[host].keep_untouched(0, touched)
            self.memories[host].commit()

    def used(self, touched: Sequence[int]) -> torch.Tensor:
        """Returns by value whether it is of a tensor that somebody has used."""
        used = torch.ones(self.elements, dtype=torch.bool)
        for slot, by_anybody in zip(self.slots, touched, strict=True):
            used[slot.offset // 4 : slot.offset // 4 + slot.elements] = bool(by_anybody)
        return used

    def owed(self, host: int) -> torch.Tensor:
        return self.arenas[host].owed[self.turns % 2, : self.elements].double()


def gradients(step: int, count: int, elements: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


WIRES = ("int8", "topk:0.05", "powersgd:2")


@pytest.mark.parametrize("wire", WIRES)
def test_what_was_given_arrives_though_hosts_are_gone_and_the_last_pays_what_it_owes(wire: str) -> None:
    hosts = Hosts(wire, 3)
    total = torch.zeros(hosts.elements).double()  # what has been given, and neither delivered nor lost with a host
    step = 0
    for those, steps in (([0, 1, 2], 5), ([0, 2], 4), ([2], 3)):
        for gone in [host for host in (hosts.those if step else []) if host not in those]:
            total -= hosts.owed(gone)
        hosts.meet(those)
        for _ in range(steps):
            given = gradients(step, 3, hosts.elements)
            total += sum((given[host].double() for host in those), torch.zeros(hosts.elements))
            total -= hosts.sum(given).double()
            hosts.commit()
            step += 1
            assert torch.allclose(total, sum((hosts.owed(host) for host in those), torch.zeros(1)), atol=1e-3)
    assert not hosts.owed(2).any()
    assert total.abs().max() < 1e-3


@pytest.mark.parametrize("wire", WIRES)
def test_what_was_given_arrives_though_some_steps_do_not_use_all_parameters(wire: str) -> None:
    hosts = Hosts(wire, 2)
    total = torch.zeros(hosts.elements).double()  # what has been given, and not delivered
    for step, touched in enumerate(
        [(1, 1, 1, 1), (1, 0, 1, 0), (0, 1, 1, 1), (1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1)]
    ):
        those = [0, 1] if step < 3 else [1]  # whoever is left alone finds a matrix that it cannot pay for yet
        if step in (0, 3):
            total -= hosts.owed(0) if step else 0
            hosts.meet(those)
        used, bases = hosts.used(touched), [basis.clone() for basis in hosts.memories[1].bases()]
        before = hosts.owed(1).clone()
        given = [one * used for one in gradients(step, 2, hosts.elements)]
        total += sum((given[host].double() for host in those), torch.zeros(hosts.elements))
        total -= hosts.sum(given).double() * used  # of the others the optimizer sees nothing
        hosts.commit(touched)
        assert torch.equal(hosts.owed(1)[~used], before[~used])
        assert torch.allclose(total, sum((hosts.owed(host) for host in those), torch.zeros(1)), atol=1e-3)
        if bases and not touched[-1]:
            assert torch.equal(hosts.memories[1].bases()[-1], bases[-1])
    assert total.abs().max() < 1e-3


def test_of_a_model_of_two_types_each_parameter_is_owed_its_own_whoever_sums_it() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4).bfloat16())
    made = ModelInArena(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    memory = WireMemory("int8", "gradient")
    owed, bases = memory.floats(made.layout)
    sizes = Sizes(1, (0,) * len(made.layout.chunks), 64, 0, ForHosts(sums=True, owed_floats=owed, bases_floats=bases))
    memory.open(ModelArena.private(made.layout, sizes, torch.device("cpu")))
    memory.connect(None)
    given = {slot.name: torch.randn(slot.shape) for slot in made.layout.slots}
    memory.take({f"gradient/0/{name}": value for name, value in given.items()}, 0, 1)
    kept = memory.collect()
    assert all(torch.equal(kept[f"gradient/0/{name}"], value) for name, value in given.items())
    for number, chunk in enumerate(made.layout.chunks):  # the last host that is left pays for all of a chunk
        values = torch.zeros(chunk.bytes // chunk.dtype.itemsize, dtype=chunk.dtype)
        memory.sum(number, values)
        for piece in chunk.pieces:
            slot = made.layout.slots[piece.slot]
            first = (slot.offset - chunk.start) // slot.dtype.itemsize
            paid = values[first : first + slot.elements].view(slot.shape)
            assert torch.equal(paid, given[slot.name].to(chunk.dtype)), slot.name


@pytest.mark.parametrize("wire", WIRES)
def test_a_try_that_was_given_up_changes_nothing_that_follows(wire: str) -> None:
    ends: list[list[Any]] = []
    for given_up in (False, True):
        hosts = Hosts(wire, 2)
        hosts.meet([0, 1])
        delivered = []
        for step in range(6):
            given = gradients(step, 2, hosts.elements)
            if given_up and step in (0, 3):
                hosts.sum([-3 * one for one in given])  # of other members, so other sums
                hosts.meet([0, 1])
            delivered.append(hosts.sum(given))
            hosts.commit()
        ends.append(delivered)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
