"""The devices of one cut replica whose parameters live on servers.

The first of them, the *leader*, is the replica to the servers: it takes tickets, pulls, pushes. The parameters lie
whole in an arena that the devices share. What the leader has pulled it *spreads* there; every device computes with its
parts of it, and leaves its gradients in its own row; the leader *gathers* the rows into the one gradient that it
pushes.

Whatever the leader learns from the servers and the others need to know, it tells them in an `Order`. So all devices run
the same script, and take the same way through it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.messages.replies import Ended, Ticket
from paceline.data.agreement import agree
from paceline.data.script_call import ScriptCall
from paceline.errors import ModelError, PacelineError
from paceline.exchange.board import Board
from paceline.exchange.mailboxes import Peers
from paceline.exchange.together import Together
from paceline.loop.engine import Batch, Computed, ReplicaWork
from paceline.loss_value import NOTHING, LossPart, Weight
from paceline.memory.arena import Arena
from paceline.memory.model_arena import ModelArena, Sizes
from paceline.optim.batchnorm import Statistics, make_exact
from paceline.optim.gradients import GradientCollector
from paceline.optim.model_in_arena import SMALLEST_SCRATCH_BYTES, ModelInArena
from paceline.optim.models import buffers_of, own_state
from paceline.run_place import Place
from paceline.split.called_cut import EarlyCalls
from paceline.split.cut import Check, Function, Loss, open_cut
from paceline.split.parts import Parts
from paceline.split.values import Split
from paceline.torch_private import AnyBatchNorm


class Order(msgspec.Struct, frozen=True, tag=True):
    """What the leader tells the others."""

    words: ClassVar[str]  # how a sentence names it


class CallMade(Order, frozen=True):
    """The leader's script has called `batches` or `evaluate`."""

    words = "a call of trainer.batches or trainer.evaluate"


class TicketTaken(Order, frozen=True):
    """The chief has handed out a ticket, or there is no more work."""

    words = "the next batch"
    answer: Ticket | Ended
    steps: int


class ComputeTicket(Order, frozen=True):
    """Forward and backward of a ticket follow, on new parameters."""

    words = "a step"
    ticket: Ticket


class StepClosed(Order, frozen=True):
    """The ticket is settled."""

    words = "the end of a step"
    loss: float
    samples: int
    replicas: int
    steps: int
    seen: int
    logged: dict[str, float] = {}


class EvaluatePart(Order, frozen=True):
    """An evaluation of these samples follows, on new parameters."""

    words = "an evaluation"
    start: int
    stop: int


class EvaluationTotal(Order, frozen=True):
    """The evaluation is over: what it came to."""

    words = "the end of an evaluation"
    values: list[float]


class ActDone(Order, frozen=True):
    """The leader has saved, or resumed."""

    words = "a save"
    steps: int


_ORDERS = msgspec.msgpack.Decoder(
    CallMade | TicketTaken | ComputeTicket | StepClosed | EvaluatePart | EvaluationTotal | ActDone
)

_LOSSES = msgspec.msgpack.Decoder(LossPart)


class Devices:
    """One of the devices, among the others of its replica."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, place: Place, split: Split) -> None:
        assert place.board is not None
        _refuse_tables(model)
        board = Board(place.board)
        board.announce(place.row)
        self.model, self.replica = model, place.replica
        together = Together(board, place.row, place.strategy.timeout_s)
        self._peers = Peers.meet(together, place.device, split.devices)
        self._peers.alike = False  # replicas with servers have only whole gradients in common
        self._everyone = self._peers.everyone
        self.cut = open_cut(split, self._peers, place.dims)
        self.leads = self._peers.rank == 0
        self._inside = ModelInArena(model, optimizer, self._peers.count)
        self._share_arena()
        self._parts = Parts(self.cut, self._inside, self._peers.rank, model)
        self._statistics = Statistics()  # of BatchNorms that see a part of each sample
        self._undo_exact = make_exact(model, Statistics())
        self._early = EarlyCalls(self.cut, model)
        self._collector: GradientCollector | None = None  # until the model is cut

    def _share_arena(self) -> None:
        inside = self._inside
        sizes = Sizes(
            replicas=self._peers.count,
            state_blocks=(0,) * len(inside.layout.chunks),
            scratch_bytes=SMALLEST_SCRATCH_BYTES,
            buffer_bytes=inside.buffer_bytes,
        )
        if self.leads:
            inside.fill(ModelArena.create(inside.layout, sizes, sparse=True))
            self.leave_buffers(self.model)
            self._everyone.broadcast(torch.tensor([os.getpid(), inside.arena.arena.descriptor]))
        else:
            process, descriptor = self._everyone.broadcast(None).tolist()
            inside.arena = ModelArena(Arena.attach(process, descriptor), inside.layout, sizes)
            inside.compare_values(f"device {self._peers.rank}", f"device 0 of replica {self.replica}")
            inside.point_to_arena()
        self.meet()

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, order: Order) -> None:
        """The leader's words to all others."""
        self._everyone.broadcast(torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8))

    def hear(self, *kinds: type[Order]) -> Any:
        """The leader's next order, which must be of one of these kinds."""
        while True:
            order = _ORDERS.decode(bytes(self._everyone.broadcast(None).tolist()))
            if isinstance(order, kinds):
                return order
            if not isinstance(order, ActDone):  # a script may let the chief alone save
                raise PacelineError(
                    f"device {self._peers.rank} waits for {' or '.join(kind.words for kind in kinds)}, and the first "
                    f"device of its replica goes on with {order.words}: in a script whose model is cut all "
                    "devices must train and evaluate alike"
                )

    def agree(self, call: ScriptCall) -> None:
        """Have all devices raise if one has called `batches` or `evaluate` with something else."""
        if self.leads:
            self.tell(CallMade())
        else:
            self.hear(CallMade)
        agree(call, self._everyone.all_reduce, self._peers.rank, self._peers.count)

    def meet(self) -> None:
        """Returns when all devices are here."""
        self._everyone.all_reduce(torch.zeros(1))

    def _of_speaker(self, values: torch.Tensor) -> torch.Tensor:
        """What the device says whose loss and metrics count, on all; nobody goes on before all have come."""
        return self._everyone.all_reduce(values if self.cut.speaks else torch.zeros_like(values))

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, function: Function, given: Any) -> None:
        """Cut the model, unless it is, now that it is known what will be computed."""
        if self._collector is not None:
            return
        self._early.end()
        self.cut.prepare(function, self.model, given)
        for module in self.model.modules():
            if isinstance(module, AnyBatchNorm) and self.cut.over_devices(module):
                module._statistics = self._statistics  # type: ignore[assignment]
        self._collector = GradientCollector(*self._parts.take(), fresh=True)

    def answer(self, function: Function, given: Any) -> Any:
        """Returns `function(model, given)`, by all devices together."""
        if self._collector is None:
            return self._early.call(function, given)
        return self.cut.call(function, self.model, given)

    def spread(self, whole: nn.Module | None = None) -> None:
        """Have all compute with the parameters and buffers of `whole`, which the leader has."""
        self.meet()  # somebody may still be reading the old ones
        if whole is not None:
            named = dict(own_state(whole).named_parameters())
            for slot in self._inside.layout.slots:
                self._inside.arena.parameter(slot).copy_(named[slot.name].detach())
            self.leave_buffers(whole)
        self.meet()
        self._parts.take_buffers()

    def leave_buffers(self, whole: nn.Module) -> None:
        """Leave the buffers of `whole`, which the leader has, where all find them."""
        for (place, _), buffer in zip(self._inside.buffer_places(), buffers_of(whole), strict=True):
            place.copy_(buffer)

    def take_buffers(self) -> None:
        """Have this device's model hold the buffers as they were left last: no device goes on before all do."""
        self._parts.take_buffers()

    def compute(self, batch: Batch, ticket: Ticket) -> Computed:
        """Runs forward and backward of the replica's samples. Returns their loss."""
        assert self._collector is not None
        with self._collector.step():
            computed = batch.compute(self, ticket)
        self._parts.mark(self._collector.finish(), self._inside.arena.touched[self._peers.rank])
        self._parts.publish_buffers()
        return Computed(self._loss_of_speaker(computed.loss), computed.samples)

    def _loss_of_speaker(self, own: LossPart) -> LossPart:
        """The loss of the device whose it is, on all; nobody goes on before all have come."""
        text = msgspec.msgpack.encode(own if self.cut.speaks else NOTHING)
        told = self._everyone.exchange(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        parts = [_LOSSES.decode(bytes(part.tolist())) for part in told]
        return next((part for part in parts if part.loss is not None), NOTHING)

    @contextmanager
    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> Iterator[None]:
        self._statistics.sum = self._everyone.all_reduce
        try:
            yield
        finally:
            self._statistics.sum = None

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        return self.cut.train(loss, self.model, batch, weight, check)

    def gather(self, whole: nn.Module) -> None:
        """Give `whole` the gradient that all have computed, and the buffers they have now."""
        arena, named = self._inside.arena, dict(own_state(whole).named_parameters())
        touched = arena.touched.tolist()
        for number, slot in enumerate(self._inside.layout.slots[: len(self._inside.trained)]):
            rows = [arena.gradient(row, slot) for row in range(self._peers.count) if touched[row][number]]
            if rows:
                named[slot.name].grad = rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
        for (place, _), buffer in zip(self._inside.buffer_places(), buffers_of(whole), strict=True):
            buffer.copy_(place)

    def measured(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums of an evaluation, from the device whose they are."""
        return self._of_speaker(sums)

    def close(self) -> None:
        self._undo_exact()
        if self._collector is not None:
            self._collector.close()
        self._inside.arena.arena.close()
        self._peers.close()


def _refuse_tables(model: nn.Module) -> None:
    for name, module in own_state(model).named_modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            raise ModelError(
                "model",
                f"{name}.weight",
                "a sparse embedding on servers cannot be in a cut model so far; give sparse=False, or do not cut it",
            )
