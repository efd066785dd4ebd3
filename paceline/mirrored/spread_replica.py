"""One replica whose stages are on several hosts: `--nnodes 2 --replicas 1 --stages 4`.

A stage boundary is the cheap place to cross a link: what crosses are the activations between two stages and their
gradients, once a micro-batch, however large the model is. Everything else stays where it is. A host updates the
parameters that its own devices compute with, and their optimizer state lies there and nowhere else:

    host 0   stage 0 ─▶ stage 1 ─┐ link ┌─▶ stage 2 ─▶ stage 3   host 1
             updates 0 and 1     └──────┘   updates 2 and 3

A weight that stages of several hosts share has a summand on each: those are added up over the hosts, and all of them
update their own copy alike.

So between steps every host has old values of what others update. They are brought up to date (`settle`) before whatever
needs the whole model: an evaluation, a save, the end of `batches`, a stop. Until then the model refuses to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from paceline.deadlines import call_limit
from paceline.errors import ReplicaDied
from paceline.exchange.board import Board
from paceline.exchange.far_mailboxes import FarMailboxes
from paceline.exchange.mailboxes import Peers
from paceline.exchange.members import MemberLost, Members
from paceline.exchange.packing import pack, receive, send
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase, Word
from paceline.loop.lockstep import BatchShare
from paceline.memory.layout import FlatLayout, Slot
from paceline.memory.model_arena import ForHosts, ModelArena
from paceline.mirrored.between_hosts import BetweenHosts
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.newest_values import NewestValues
from paceline.mirrored.one_host import OneHost, OptimizerStates
from paceline.mirrored.owner import Owner
from paceline.mirrored.step_parts import DecidedStep
from paceline.mirrored.step_totals import StepTotals


class SpreadReplica(BetweenHosts):
    """The other hosts, on which the other stages of this replica are."""

    sums_gradients = False
    has_all = False

    def __init__(
        self, together: Together, links: LinkMaker, peers: Peers, far: FarMailboxes, asked: FarMailboxes
    ) -> None:
        super().__init__(together, links, "fp32", peers.count)
        self.landed = None  # nothing is sent while backward runs
        self._peers = peers
        far.look = self._look_at_hosts
        self._newest = NewestValues(asked, lambda: together.board.host_get(HostWord.CLOSED), self._values_of_this_host)
        self._gradients: dict[int, torch.Tensor] = {}  # by slot: of this step, that only other hosts have
        self._users: Callable[[str], Set[int]] = lambda _: set()  # by name: the devices that compute with a tensor
        self._common: list[int] = []  # slots of this step that several hosts have gradients for
        self._summed: list[int] = []  # those of which the sum was left in this process's buffer
        self._buffers: list[tuple[str, torch.Tensor]] = []

    def keeps(self, layout: FlatLayout) -> ForHosts:
        return ForHosts()

    def open(self, arena: ModelArena, owner: Owner, sums: SharedSums, buffers: Sequence[torch.Tensor]) -> None:
        self._arena, self._owner, self._sums = arena, owner, sums

    def share(self, members: Members, index: int, count: int) -> BatchShare:
        return BatchShare(0, 1)

    def divided(self, users: Callable[[str], Set[int]], buffers: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._users, self._buffers = users, list(buffers)

    def _hosts_of(self, name: str) -> list[int]:
        """Returns the hosts that have the newest values of a parameter or buffer; where nobody uses it, all do."""
        return self._peers.hosts_of(self._users(name)) or list(range(self.most))

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_hosts(self) -> None:
        try:
            self._look()
        except MemberLost:
            raise ReplicaDied("another host is gone, and a cut model needs all its devices: see the output") from None

    def begin(self, members: Members, number: int) -> None:
        self.enter(members)
        for slot in self._summed:  # by itself this process need not have a gradient for it in the next step
            self._arena.gradient(members.replica, self._arena.layout.slots[slot]).zero_()
        self._summed = []

    def computed(self, members: Members, number: int) -> None:
        """Gradients stay here."""

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        if not everywhere.counted:
            return None
        unit = max(board.get_float(rank, Word.UNIT) for rank in ranks)  # one device, on one host, knows
        return dict.fromkeys(ranks, float(self.sum(torch.tensor(unit, dtype=torch.float64))) / everywhere.counted)

    def touched(self, here: torch.Tensor, hosts: torch.Tensor) -> torch.Tensor:
        slots = self._arena.layout.slots
        on = [self._hosts_of(slot.name) if count else [] for slot, count in zip(slots, hosts.tolist(), strict=True)]
        self._common = [number for number, having in enumerate(on) if len(having) > 1]
        common = torch.tensor([len(having) > 1 and self.number in having for having in on])
        return (here > 0) | common

    def agree(self, step: DecidedStep) -> None:
        """Adds up what several hosts have a summand of; one process of each host does, into its own buffer."""
        members, arena = step.members, self._arena
        if members.first != members.replica:
            return
        for number in self._common:
            slot = arena.layout.slots[number]
            having = [rank for rank in members.ranks if arena.touched[rank, number]]
            mine = arena.gradient(members.first, slot)
            total = torch.zeros_like(mine, dtype=torch.float32 if mine.dtype.itemsize < 4 else mine.dtype)
            for rank in having:
                total += arena.gradient(rank, slot)
            total = self._sum_of_firsts(total)
            for rank in having:
                arena.gradient(rank, slot).zero_()
            if step.touched[number]:
                mine.copy_(total)
                arena.touched[members.first, number] = 1
                self._summed.append(number)

    def _sum_of_firsts(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all hosts of what their first members give; these alone call it."""
        assert self._links is not None
        with self._crossing():
            return self._links.sum(values)

    def squared_norm_of_all(self, step: DecidedStep, own: float) -> float:
        twice = 0.0  # of what another host counts as well
        for number in self._common:
            slot = self._arena.layout.slots[number]
            if step.touched[number] and self._hosts_of(slot.name)[0] != self.number:
                first = step.members.first
                weight = 1.0 if step.weights is None else step.weights[first]
                gradient = self._arena.gradient(first, slot) * weight
                gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                twice += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        with self._not_tried_again("adding up the length of the gradient"):
            return float(self.sum(torch.tensor(own - twice, dtype=torch.float64)))

    def decided(self, step: DecidedStep) -> None:
        self._step = step

    def meet(self) -> None:
        """Has host 0 know all gradients, for a record."""

        def gradients() -> dict[int, torch.Tensor]:
            slots = enumerate(self._arena.layout.slots)
            touched = {n: slot for n, slot in slots if slot.group is not None and self._step.touched[n]}
            return {n: OneHost.gradient(self, self._step, self._arena, slot) for n, slot in touched.items()}

        self._gradients = self._to_host_0("gradients", gradients)
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)

    def gradients_elsewhere(self) -> dict[int, torch.Tensor]:
        return self._gradients

    def arrived(self, chunk: int) -> None:
        """It is here."""

    def closed(self) -> None:
        self.apart = True

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        return OneHost.gradient(self, step, arena, slot)

    def close(self) -> None:
        self._newest.close()
        super().close()

    # ── the whole model ──────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> bool:
        """All hosts take over what the others have come to; one process of each exchanges it."""
        if not self.apart:
            return False
        self._together.attempt(self._try_to_settle)
        self.apart = False
        return True

    def _try_to_settle(self, members: Members) -> None:
        self._together.board.work_on(members, Kind.SETTLE, Phase.AWAITING_HOSTS)
        self.enter(members)
        self.begin_call(Kind.SETTLE)  # else what follows could meet activations of a step
        self._together.arrive(members, Phase.AWAITING_HOSTS)  # all have left their buffers
        if members.first == members.replica:
            with self._not_tried_again("giving the others its parameters"):
                self._exchange_tensors()
        self.decide(members)

    def _exchange_tensors(self) -> None:
        for other in self._firsts():
            for tensor in self._values_of_this_host():
                self._peers.send(tensor, other)
        for other in self._firsts():
            for _, tensor in self._values_of(self._peers.hosts_of([other])[0]):
                tensor.copy_(self._peers.receive(other))

    def _values_of(self, host: int) -> list[tuple[str, torch.Tensor]]:
        """Returns by name what others have from this host, where it lies here."""
        named = [(slot.name, self._arena.parameter(slot)) for slot in self._arena.layout.slots]
        on = [(name, tensor, self._hosts_of(name)) for name, tensor in [*named, *self._buffers]]
        return [(name, tensor) for name, tensor, having in on if having[0] == host and len(having) < self.most]

    def _values_of_this_host(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._values_of(self.number)]

    def newest(self) -> dict[str, torch.Tensor]:
        if not self.apart:
            return {}
        step = self._together.board.host_get(HostWord.CLOSED)
        limit = call_limit()
        longest_s = self._together.timeout_s if limit is None else min(limit.limit_s, self._together.timeout_s)
        given = self._newest.ask(self._firsts(), step, longest_s)
        by_device = {device: self._values_of(self._peers.hosts_of([device])[0]) for device in given}
        return {
            name: value
            for device, values in given.items()
            for (name, _), value in zip(by_device[device], values, strict=True)
        }

    def _firsts(self) -> list[int]:
        """Returns the first devices of the other hosts."""
        return [host * len(self._peers.here) for host in range(self.most) if host != self.number]

    def states(self, own: Callable[[], OptimizerStates]) -> OptimizerStates:
        return self._to_host_0("optimizer state", own)

    def _to_host_0(self, what: str, own: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Returns, to the first device of host 0, by slot what the other hosts have; all call it."""
        found: dict[int, Any] = {}
        if self._peers.rank != self._peers.here.start:
            return found
        slots = self._arena.layout.slots
        with self._not_tried_again(f"giving host 0 its {what}"):
            if self.number:
                here = {n: value for n, value in own().items() if self._hosts_of(slots[n].name)[0] == self.number}
                send(self._peers, pack(here), 0)
            else:
                for other in self._firsts():
                    found |= receive(self._peers, other)[0]
        return found
