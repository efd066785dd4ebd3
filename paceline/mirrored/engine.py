"""Mirrored replicas: a step is proposed by all, and committed.

    replica    ── compute its part ──▶ arrive ─┐                ┌─ update own shard ─▶ done ─┐
    replica    ── compute its part ─────▶ arrive ┤ all arrived  ├─ update own shard ──▶ done ┤ all done
    replica    ── compute its part ──▶ arrive ─┘                └─ update own shard ─▶ done ─┘

Before all have arrived nothing has changed: a death there means that the others try the step again, with its
samples divided among them. After that every gradient is in the arena, and the step will be completed, by whoever
is left.

With several hosts each host holds all of this, and its owners add up with those of the same shard elsewhere (`Links`)
before they update. Between hosts a death is not survived: the hosts that are left say so and end.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.errors import DataError, ModelError
from paceline.exchange.board import Board, HostWord, Kind, Members, Phase, Word
from paceline.exchange.links import Links
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.loop.engine import Closed, Computed, Share, StateByName
from paceline.mirrored.between_hosts import BUCKET_BYTES, BetweenHosts
from paceline.mirrored.owner import Owner
from paceline.mirrored.shared_model import SharedModel
from paceline.optim.batchnorm import Statistics, has_batchnorm, make_exact
from paceline.optim.gradients import Destination, GradientCollector, Whole
from paceline.optim.models import own_state
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.run_place import Place
from paceline.split.cut import Cut, Example
from paceline.split.parts import Parts

if TYPE_CHECKING:
    from paceline.central.replica.only_tables import TablesOnServers


class MirroredEngine:
    """One replica among several that share a model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        place: Place,
        board: Board,
        links: Links | None = None,
        cut: Cut | None = None,
    ) -> None:
        self._model = model
        self.cut = cut
        self._board = board
        self._replica = place.row
        self._links = links
        self._together = Together(board, place.row, place.strategy.timeout_s)
        self.joining = place.restarted and not board.alive(self._replica)  # an earlier trainer of it may have joined
        self.gradients_ready: Callable[[], None] | None = None
        self.notes_for_joining: Callable[[], dict[str, Any]] = dict
        board.announce(self._replica)
        self._tables = _open_tables(model, optimizer, place, board)
        board.host_set(HostWord.FIRST_REPLICA, place.host * place.rows)
        self._shared = SharedModel(
            model, optimizer, self._together, several_hosts=links is not None, sparse=cut is not None
        )
        self._shared.join() if self.joining else self._shared.share()
        arena = self._arena = self._shared.arena
        self._optimizer = ShardOptimizer(optimizer, arena, self._shared.states)
        bucket_bytes = BUCKET_BYTES * board.replicas if links is not None else None
        self._owner = Owner(self._together, arena, self._optimizer, bucket_bytes)
        self._courier = BetweenHosts(self._together, arena, self._owner, links) if links is not None else None
        landed = self._courier.landed if self._courier is not None else None
        trained = self._shared.trained
        destinations: list[Destination] = [
            Whole(arena.gradient(self._replica, slot)) for slot in arena.layout.slots[: len(trained)]
        ]
        self._collector = GradientCollector(trained, destinations, landed)
        self._sums = SharedSums(self._together, arena)
        self._ranks: tuple[int, ...] = ()
        self._count = 0
        self._some_were_idle = False  # in this step a member had no samples in some pass
        self._touched: list[int] = []  # by slot: whether anybody has a gradient for it in the step that is being closed
        self._has_batchnorm = has_batchnorm(model)
        self._exact_statistics = getattr(place.strategy, "batchnorm", "exact") == "exact"
        self._statistics, self._statistics_of_all = Statistics(), Statistics()
        self._undo_exact = make_exact(model, self._statistics)
        self._devices = cut.peers.count if cut is not None else 1
        self._parts = Parts(cut, self._shared, self._replica, model) if cut is not None else None
        if links is not None:
            self._shared.compare_hosts(links)
        if self._shared.users_state and not self.joining:
            self._together.once(lambda: self._optimizer.take_state(self._shared.users_state))

    # ── ops ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def chief(self) -> bool:
        return self._together.is_chief() and (self._links is None or self._links.host == 0)

    def once(self, act: Callable[[], None]) -> None:
        first_host = self._links is None or self._links.host == 0
        self._together.once(act if first_host else lambda: None)
        if self._links is not None:
            self._links.sum(torch.zeros(1))  # nobody goes on before the first host is done

    def prepare(self, example: Example) -> None:
        assert self.cut is not None
        assert self._parts is not None
        self.cut.prepare(self._model, example)
        for module in self._model.modules():
            if isinstance(module, _BatchNorm) and self.cut.over_devices(module):
                module._statistics = self._statistics_of_all  # type: ignore[assignment]
        destinations = self._parts.take()
        # Parameters are other tensors from here on: gradients are waited for anew.
        self._collector.close()
        self._collector = GradientCollector(self._shared.trained, destinations, fresh=True)
        self._parts.publish_buffers()
        self._together.meet(Kind.BUILD, Phase.AWAITING_DEVICES)

    def _share(self, members: Members) -> Share:
        if self.cut is not None:
            return Share(self._replica // self._devices, len(members.ranks) // self._devices)
        index, count = members.ranks.index(self._replica), len(members.ranks)
        if self._links is None:
            return Share(index, count)
        return Share(self._links.host * count + index, self._links.hosts * count)

    def share(self) -> Share:
        return self._share(self._together.coming())

    def expect(self, steps: int) -> None:
        self._board.host_set(HostWord.TOTAL_STEPS, steps)

    @contextmanager
    def one_pass(self, *, is_last: bool, among: Sequence[int]) -> Iterator[None]:
        self._collector.last_pass(is_last)
        self._some_were_idle |= len(among) < self._count
        if self._exact_statistics and len(among) > 1:
            self._statistics.sum = self._statistics_over(among)
        if self._devices > 1:
            replicas = among if self._exact_statistics else [self._replica // self._devices]
            everybody = [replica * self._devices + device for replica in replicas for device in range(self._devices)]
            self._statistics_of_all.sum = lambda values: self._sums.sum(values, everybody)
        try:
            yield
        finally:
            self._statistics.sum = self._statistics_of_all.sum = None

    def _statistics_over(self, among: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        links = self._links
        if links is None:
            # Of a cut model, from those that have the same part.
            part = self._replica % self._devices
            ranks = [self._ranks[index * self._devices + part] for index in among]
            return lambda values: self._sums.sum(values, ranks)
        if self._has_batchnorm and len(among) < links.hosts * len(self._ranks):
            raise DataError(
                "batch size",
                f"too small for {links.hosts * len(self._ranks)} replicas in the last batch",
                "with BatchNorm on several hosts every replica needs samples in every batch; give drop_last=True",
            )
        return lambda values: links.sum(self._sums.sum(values, self._ranks))

    def step(self, number: int, compute: Callable[[Share], Computed], clip_norm: float | None) -> Closed:
        board, me = self._board, self._replica
        board.set(me, Word.STEP, number)
        began = time.monotonic_ns()
        buffers_before = [buffer.clone() for buffer in self._shared.buffers]
        tried: list[Members] = []

        def one_try(members: Members) -> tuple[Members, int]:
            board.work_on(members, Kind.STEP, Phase.COMPUTING)
            self._owner.divide(members.ranks)
            self._ranks = members.ranks
            self._count = self._share(members).count
            self._some_were_idle = False
            if tried:  # a try that was given up may have changed running statistics
                for buffer, before in zip(self._shared.buffers, buffers_before, strict=True):
                    buffer.copy_(before)
            tried.append(members)
            self._sums.begin(members)
            if self._courier is not None:
                self._courier.begin(members)
            with self._collector.step():
                if self._tables is not None:
                    self._tables.begin()
                computed = compute(self._share(members))
            used = self._collector.finish()
            if self._parts is not None:
                self._parts.mark(used, self._arena.touched[me])
            else:
                self._arena.touched[me, : len(used)] = torch.tensor(used, dtype=torch.uint8)
            if self._courier is not None:
                self._courier.all_landed()
            if self._tables is not None:
                self._tables.push(number)
            self._report(computed)
            if members.chief == me:
                self._chief_duties(members)
            computed_at = time.monotonic_ns()
            self._together.arrive(members, Phase.AWAITING_GRADIENTS)
            return members, computed_at

        members, computed_at = self._together.attempt(one_try)
        # From here on the step is decided: it will be completed by whoever is left.
        arrived_at = time.monotonic_ns()
        board.enter(me, Phase.UPDATING)
        self._check_options(members)
        closed, touched = self._close(members)
        self._touched = touched.tolist()
        if board.host_get(HostWord.BUFFERS_OF) == members.op:
            self._parts.take_buffers() if self._parts is not None else self._shared.take_buffers(self._links)
        if self._courier is not None:
            self._courier.finish()
            board.enter(me, Phase.UPDATING)
        self._owner.begin(self._touched, self._touched_by_rank(members))
        scale = 1.0
        if clip_norm is not None:
            length = self._owner.norm(members)
            if self._tables is not None:
                length = math.sqrt(length**2 + self._tables.squared_norm(number, members.ranks))
            scale = min(1.0, clip_norm / (length + 1e-6))
        if self._tables is not None:
            self._tables.make(number, members.ranks, scale)
        if self.gradients_ready is not None:
            if self._links is not None:  # the sums of the other owners' shards have to be back too
                self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)
            if members.chief == me:
                self.gradients_ready()
        self._owner.update(members, scale)
        if self._links is not None:
            self._links.commit()
        board.host_set(HostWord.CLOSED, members.op)
        now = time.monotonic_ns()
        board.set(me, Word.COMPUTE_NS, computed_at - began)
        board.set(me, Word.WAIT_NS, arrived_at - computed_at)
        board.set(me, Word.UPDATE_NS, now - arrived_at)
        board.set_float(me, Word.MEAN_LOSS, closed.loss)
        board.set(me, Word.SAMPLES_SEEN, board.get(me, Word.SAMPLES_SEEN) + closed.samples)
        board.set(me, Word.STEP, number + 1)
        board.enter(me, Phase.BETWEEN)
        return closed

    def _close(self, members: Members) -> tuple[Closed, torch.Tensor]:
        """What the step came to, over all hosts; and by slot whether anybody has a gradient for it."""
        board, ranks = self._board, members.ranks
        touched = self._arena.touched[list(ranks)].amax(0)
        numbers = torch.tensor(
            [
                sum(board.get_float(rank, Word.LOSS) for rank in ranks),
                sum(board.get(rank, Word.SAMPLES) for rank in ranks),
                len(ranks),
                board.host_get(HostWord.STOP_AFTER) == members.op,
                board.get(self._replica, Word.OPTIONS),
            ],
            dtype=torch.float64,
        )
        if self._links is not None:
            totals = self._links.sum(torch.cat([numbers, touched.double()]))
            if totals[4] != numbers[4] * self._links.hosts:
                raise _different_options(f"host {self._links.host}", "another host")
            numbers, touched = totals[:5], totals[5:] > 0
        loss, samples, count, stop, _ = numbers.tolist()
        return Closed(loss, int(samples), int(count) // self._devices, bool(stop)), touched

    def _touched_by_rank(self, members: Members) -> dict[int, list[int]] | None:
        if self.cut is None:
            return None
        return {rank: self._arena.touched[rank].tolist() for rank in members.ranks}

    def _report(self, computed: Computed) -> None:
        self._optimizer.refresh_options()
        speaks = self.cut is None or self.cut.speaks
        self._board.set_float(self._replica, Word.LOSS, computed.loss if speaks else 0.0)
        self._board.set(self._replica, Word.SAMPLES, computed.samples if speaks else 0)
        if self._parts is not None:
            self._parts.publish_buffers()
        self._board.set(self._replica, Word.OPTIONS, self._optimizer.options_fingerprint())

    def _check_options(self, members: Members) -> None:
        mine = self._board.get(self._replica, Word.OPTIONS)
        for other in members.ranks:
            if self._board.get(other, Word.OPTIONS) != mine:
                raise _different_options(f"replica {self._replica}", f"replica {other}")

    def _chief_duties(self, members: Members) -> None:
        """Decisions that hold from this step on: written before the chief arrives, read after all have."""
        board = self._board
        if board.host_get(HostWord.STOP_REQUESTED) and not board.host_get(HostWord.STOP_AFTER):
            board.host_set(HostWord.STOP_AFTER, members.op)
        joining = board.any_joining(members.chief, members.op)
        # Local statistics are the chief's. So are exact ones when a member had no samples in some pass and has missed
        # its statistics; the chief, being first, has samples in every pass.
        spread = not self._exact_statistics or self._some_were_idle
        if self._parts is None and (joining or spread):
            self._shared.publish_buffers()
        if spread:
            board.host_set(HostWord.BUFFERS_OF, members.op)
        if joining:
            self._arena.write_notes(self.notes_for_joining())
            board.admit_joining(members.chief, members.op)

    def total(self, compute: Callable[[Share], torch.Tensor]) -> torch.Tensor:
        def one_try(members: Members) -> torch.Tensor:
            self._board.work_on(members, Kind.EVALUATE, Phase.EVALUATING)
            self._sums.begin(members)
            found = compute(self._share(members))
            if self.cut is not None and not self.cut.speaks:
                found.zero_()
            sums = self._sums.sum(found, members.ranks)
            return sums if self._links is None else self._links.sum(sums)

        total = self._together.attempt(one_try)
        self._board.enter(self._replica, Phase.BETWEEN)
        return total

    # ── joining a run in progress ────────────────────────────────────────────────────────────────────────

    def join(self) -> dict[str, Any]:
        """Wait to be admitted. Returns the chief's notes on the step after which this replica takes part."""
        board, me = self._board, self._replica
        incarnation = board.get(me, Word.INCARNATION)
        board.set(me, Word.JOINING, incarnation)

        def admitted() -> bool:
            living = [rank for rank in range(board.replicas) if board.alive(rank)]
            if not living:
                raise SystemExit(0)  # the others have finished meanwhile
            if any(board.get(rank, Word.ARENAS) > board.get(me, Word.ARENAS) for rank in living):
                print(f"replica {me} cannot join any more: the script has gone on to another trainer", file=sys.stderr)
                raise SystemExit(0)
            return board.get(me, Word.ADMITTED) == incarnation and (
                board.host_get(HostWord.CLOSED) >= board.get(me, Word.ADMIT_AT) - 1
            )

        board.wait(me, Phase.AWAITING_ADMISSION, admitted, self._together.timeout_s)
        board.set(me, Word.OP, board.get(me, Word.ADMIT_AT) - 1)
        self._shared.take_buffers()
        notes = self._arena.read_notes()
        board.set(me, Word.SAMPLES_SEEN, max(board.get(rank, Word.SAMPLES_SEEN) for rank in range(board.replicas)))
        board.set(me, Word.JOINING, 0)
        self.joining = False
        return notes

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> dict[str, torch.Tensor]:
        """The step's summed gradients by parameter name, while the step is open."""
        op = self._board.get(self._replica, Word.OP)
        found = self._tables.gradients() if self._tables is not None else {}
        for number, slot in enumerate(self._shared.layout.slots):
            if slot.group is not None and self._touched[number]:
                ranks = self._board.members(self._replica, op).ranks
                parts = [self._arena.gradient(rank, slot) for rank in ranks]
                if self._links is not None:
                    parts = [self._arena.summed(slot)]
                found[slot.name] = torch.stack(parts).sum(0)
        return found

    def optimizer_state(self) -> StateByName:
        slots = self._shared.layout.slots
        held = self._tables.read()[1] if self._tables is not None else {}
        return held | {slots[number].name: state for number, state in self._optimizer.give_state().items()}

    def model_state(self) -> dict[str, torch.Tensor]:
        if self._parts is not None:
            return self._parts.whole_state()
        state = own_state(self._model).state_dict()
        return state | self._tables.read()[0] if self._tables is not None else state

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName) -> None:
        model, optimizer = dict(model), dict(optimizer)
        tables = self._tables.names if self._tables is not None else set()
        of_tables = {name: model.pop(name) for name in tables}, {name: optimizer.pop(name, {}) for name in tables}
        numbers = {slot.name: number for number, slot in enumerate(self._shared.layout.slots)}
        if self._parts is not None:
            self._take_whole_state(self._parts, model, {numbers[name]: state for name, state in optimizer.items()})
            return
        # Buffers are every replica's own; parameters and optimizer state lie once, and the chief fills them in.
        shared = {slot.name for slot in self._shared.layout.slots}
        own_state(self._model).load_state_dict({k: v for k, v in model.items() if k not in shared}, strict=False)

        def fill() -> None:
            missing = own_state(self._model).load_state_dict(model, strict=not tables).missing_keys
            if sorted(missing) != sorted(tables):
                raise ModelError("model", sorted(set(missing) - tables)[0], "it is not in the checkpoint")
            if self._tables is not None:
                self._tables.put(*of_tables)
            self._optimizer.take_state({numbers[name]: state for name, state in optimizer.items()})

        self._together.once(fill)
        self._optimizer.forget()

    def _take_whole_state(
        self, parts: Parts, model: dict[str, torch.Tensor], states: dict[int, dict[str, Any]]
    ) -> None:
        def fill() -> None:
            missing = sorted(set(own_state(self._model).state_dict()) - set(model))
            if missing:
                raise ModelError("model", missing[0], "it is not in the checkpoint")
            parts.take_state(model)
            self._optimizer.take_state(states)

        self._together.once(fill)
        parts.take_buffers()
        self._optimizer.forget()
        self._together.meet(Kind.SAVE, Phase.AWAITING_SAVE)

    def close(self) -> None:
        if self.cut is not None:
            self.cut.peers.close()
        self._collector.close()
        self._undo_exact()
        self._arena.arena.close()
        if self._tables is not None:
            self._tables.close()


def _open_tables(model: nn.Module, optimizer: Optimizer, place: Place, board: Board) -> TablesOnServers | None:
    if place.servers is None:
        return None
    from paceline.central.replica.only_tables import TablesOnServers

    number, incarnation = board.get(place.row, Word.ARENAS) + 1, board.get(place.row, Word.INCARNATION)
    return TablesOnServers(model, optimizer, place, number, incarnation)


def _different_options(one: str, other: str) -> ModelError:
    return ModelError(
        "optimizer",
        f"the options of {one}",
        f"they differ from those of {other} (learning rate, momentum …); change them alike in every replica, and give "
        "a scheduler to Trainer(scheduler=…) so that it is restored",
    )
