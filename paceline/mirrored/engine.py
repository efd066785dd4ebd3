"""Mirrored replicas: a step is proposed by all, and committed.

    replica    ── compute its part ──▶ arrive ─┐                ┌─ update own shard ─▶ done ─┐
    replica    ── compute its part ─────▶ arrive ┤ all arrived  ├─ update own shard ──▶ done ┤ all done
    replica    ── compute its part ──▶ arrive ─┘                └─ update own shard ─▶ done ─┘

Before all have arrived nothing has changed: a death there means that the others try the step again, with its
samples divided among them. After that every gradient is in the arena, and the step will be completed, by whoever
is left.

With several hosts each host holds all of this, and its owners add up with those of the same shard elsewhere
(`BetweenHosts`) before they update. Then all have arrived when they have on every host, which each has to hear from the
others; how deaths are survived there is in `exchange/host_views.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.agreement import agree
from paceline.data.script_call import ScriptCall
from paceline.errors import DeadlineExceeded
from paceline.exchange.members import Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase, Word
from paceline.loop.engine import Batch, Chapter, Closed, Computed, ReplicaWork
from paceline.loop.lockstep import BatchShare, LedgerSamples, LockstepEngine
from paceline.loop.run_state import RunState, StateByName
from paceline.loss_value import NOTHING, FoundLoss, LossPart, Weight, differing_kinds, nothing_counted
from paceline.mirrored.device_model import DeviceModel
from paceline.mirrored.joining import Joining
from paceline.mirrored.logged_numbers import LoggedNumbers
from paceline.mirrored.model_part import CutModel, WholeModel
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.owner import Owner
from paceline.mirrored.script_writes import ScriptWrites
from paceline.mirrored.shared_model import SharedModel
from paceline.mirrored.statistics import BatchStatistics
from paceline.mirrored.step_parts import DecidedStep, OwnShard, StepPart
from paceline.mirrored.step_totals import StepTotals, check_options, different_options, leave_count, leave_loss
from paceline.mirrored.whole_state import WholeState
from paceline.optim.host_copy import HostCopy
from paceline.optim.models import lent
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.split.cut import Check, Cut, Function, Loss
from paceline.stoppable_calls import check_in_time, in_time
from paceline.torch_private import is_compiled


class MirroredEngine(LockstepEngine):
    """One process among several that share a model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        together: Together,
        *,
        hosts: OneHost,
        replica: int,
        clip_norm: float | None,
        batchnorm: str,
        cut: Cut | None = None,
        copy: HostCopy | None = None,
        elsewhere: StepPart | None = None,
        joining: bool = False,
        host_joins: bool = False,
        most_steps: int | None = None,
    ) -> None:
        """`cut`: what this process does of a replica that several devices are. `copy`: of a model that is on an
        accelerator, which owners are to know in its place. `elsewhere`: parameters that lie with
        nobody here, and their part in a step. `joining`: this process was started again in a run in progress.
        `host_joins`: so was all of its host. `most_steps`: after which the run stops."""
        self.model, self.replica, self.joining = model, replica, joining or host_joins
        self._host_joins, self._most_steps = host_joins, most_steps or math.inf
        self._together, self._hosts, self._clip_norm = together, hosts, clip_norm
        self._board, self._row = together.board, together.replica
        known, optimizer = (model, optimizer) if copy is None else (copy.model, copy.optimizer)
        shared = self._shared = SharedModel(
            known,
            optimizer,
            together,
            for_hosts=hosts.keeps,
            whole_tensors=hosts.whole_tensors,
            sparse=cut is not None,
        )
        shared.join() if joining else shared.share()
        self._optimizer = ShardOptimizer(optimizer, shared.arena, shared.states)
        updating = self._optimizer.beside() if hosts.overlaps else self._optimizer  # else in this thread
        owner = Owner(together, shared.arena, updating, hosts.bucket_bytes, hosts.arrived)
        self._sums = SharedSums(together, shared.arena)
        hosts.open(shared.arena, owner, self._sums, shared.buffers)
        self._logged = LoggedNumbers(together, shared.arena, hosts)
        if cut is not None:
            self._part: WholeModel = CutModel(cut, model, shared, together, hosts)
        elif copy is not None:
            self._part = DeviceModel(copy, shared, together, hosts)
        else:
            self._part = WholeModel(model, shared, together, hosts)
        devices = self._part.devices
        self._statistics = BatchStatistics(model, self._sums, hosts, self._row, devices, exact=batchnorm == "exact")
        self._joining = Joining(together, shared.arena, self._part.publish_buffers, lambda: self.state_for_joining())
        self._elsewhere = elsewhere or StepPart()
        shard = OwnShard(owner, self._part.rows, self._show_gradients, hosts.squared_norm_of_all, hosts.update_shards)
        self._parts = [self._statistics, self._part, hosts, self._joining, self._elsewhere, shard]
        if self._board.replicas > 1 and cut is None and copy is None and (hosts.sums_gradients or not hosts.several):
            self._parts.append(ScriptWrites(shared.arena))
        self._count = 0  # members of the step, on all hosts
        self._in_backward = False  # this replica, in the try that is being made
        self._step: DecidedStep | None = None  # the last
        self._incomplete: DecidedStep | None = None  # the same, while its updates are still under way
        if hosts.overlaps:
            hosts.on_touch = self._complete
        self._whole = WholeState(shared, self._optimizer, self._part, hosts, self._elsewhere)
        self._board.host_set(HostWord.MODEL, shared.fingerprint())
        if hosts.several and not self.joining:
            together.attempt(self._compare_hosts)
        if shared.users_state and not self.joining:
            together.once(lambda: self._optimizer.take_state(shared.users_state))

    @property
    def in_charge(self) -> bool:
        return self._together.is_first() and self._hosts.leads

    def share(self) -> BatchShare:
        return self._part.share(self._together.coming())

    def expect(self, steps: int) -> None:
        self._board.host_set(HostWord.TOTAL_STEPS, steps)

    def prepare(self, function: Function, given: Any) -> None:
        self._part.prepare(function, given, self._statistics)

    def compute(self, function: Function, given: Any) -> Any:
        return self._part.compute(function, given)

    def meet_devices(self) -> None:
        self._part.meet_devices()

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self._complete()
        with lent(self.model, self._hosts.newest()), self._part.old_values_allowed():
            yield self.model

    def once(self, number: int, act: Callable[[], None]) -> None:
        self._settle()

        def one_try(members: Members) -> None:
            with self._call(members, Kind.SAVE, Phase.SAVING, Phase.AWAITING_SAVE):
                first = members.first == self._row
                self._whole.collect(first=first)
                if first and self._hosts.leads:
                    act()
                self._together.arrive(members, Phase.AWAITING_SAVE)
                self._hosts.begin_call(Kind.SAVE)  # nobody goes on before the first host is done

        self._together.attempt(one_try)
        self._board.enter(self._row, Phase.BETWEEN)

    def _complete(self) -> None:
        """Returns when the last step is complete."""
        self._hosts.complete()
        if (step := self._incomplete) is None:
            return
        self._incomplete = None
        for part in reversed(self._parts):  # a device takes over what hosts have made of the parameters
            part.closed()
        self._board.host_set(HostWord.CLOSED, step.members.op)

    def _settle(self) -> None:
        """Returns when all hosts have the same parameters, wherever they are computed with."""
        self._complete()
        if self._hosts.apart:
            self._part.settling()
        if self._hosts.settle():
            self._part.settled()

    def _bring_all_here(self) -> None:
        """Whoever records the step needs it whole."""
        self._settle()
        self._whole.collect_states()

    def _compare_hosts(self, members: Members) -> None:
        self._board.work_on(members, Kind.BUILD, Phase.STARTING)
        self._sums.begin(members)
        self._hosts.enter(members)
        self._shared.compare_hosts(self._hosts.sum, self._hosts.count)
        self._hosts.decide(members)

    def join(self) -> RunState:
        state = self._joining.join_with_host(self._bring_state) if self._host_joins else self._joining.join()
        self._shared.take_buffers()
        self._optimizer.forget()
        self._part.closed()  # of a model on a device, what it finds goes there
        self.joining = False
        return state

    def _let_hosts_in(self, members: Members) -> None:
        """Those that are ready come in with the run's state, as it is after this step."""
        assert self._together.views is not None
        self._together.views.leave_to_let_in(members)
        self._together.attempt(self._bring_state)

    def _bring_state(self, members: Members) -> None:
        self._board.work_on(members, Kind.LET_IN, Phase.AWAITING_HOSTS)
        self._hosts.enter(members)
        self._hosts.begin_call(Kind.LET_IN)
        if members.first == self._row:
            self._hosts.bring(self._joining.written_state, needs=self.joining)
        self._hosts.decide(members)

    # ── as a worker ──────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> Iterator[None]:
        self._part.collector.last_pass(is_last)
        with self._statistics.one_pass(work.among[number], self._count):
            yield

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        if self._hosts.sums_gradients and self._part.devices == 1:  # gradients are weighed while backward still runs
            return self._part.train(loss, batch, weight, lambda returned: self._after_forward(check(returned), weight))
        return self._part.train(loss, batch, weight, check)

    def _after_forward(self, found: FoundLoss, weight: Weight) -> FoundLoss:
        self._begin_backward()
        before = self._board.get_float(self._row, Word.COUNT)
        leave_count(self._board, self._row, found.part(weight), max(0.0, before))
        return found

    def _begin_backward(self) -> None:
        """What the step before has left where gradients go, and on the board, is not needed any more."""
        self._complete()
        if not self._in_backward:
            self._in_backward = True
            leave_count(self._board, self._row, NOTHING)
        self._hosts.begin_backward()

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self, batches: Sequence[Batch]) -> Closed:
        (batch,) = batches
        board, me, number = self._board, self._row, batch.work.step
        board.begin_step(me, number)
        began = time.monotonic_ns()
        try:
            closed, step, computed_at, arrived_at = self._together.attempt(
                partial(self._try, batch, number), limited=True
            )
        except DeadlineExceeded:
            self._part.put_buffers_back()
            board.enter(me, Phase.BETWEEN)
            raise
        # From here on the step is decided: it will be completed by whoever is left.
        self._step = step
        for part in self._parts:
            part.decided(step)
        scale = 1.0
        if self._clip_norm is not None:
            length = math.sqrt(sum(part.squared_norm(step) for part in self._parts))
            scale = min(1.0, self._clip_norm / (length + 1e-6))
        for part in self._parts:
            part.update(step, scale)
        self._incomplete = step
        if not self._hosts.overlaps:
            self._complete()
        if closed.stop or number + 1 >= self._most_steps:  # whoever stops here may never settle again
            self._settle()
        if self.gradients_ready is not None:
            self._bring_all_here()
        if step.lets_in and not closed.stop:
            self._let_hosts_in(step.members)
        times_ns = (computed_at - began, arrived_at - computed_at, time.monotonic_ns() - arrived_at)
        board.end_step(me, times_ns, closed.loss, board.get(me, Word.SAMPLES_SEEN) + closed.samples, number + 1)
        return closed

    def _try(self, batch: Batch, number: int, members: Members) -> tuple[Closed, DecidedStep, int, int]:
        """Computes this replica's part, and waits for the others'. Returns what all have come to, when this one had
        computed, and when all of this host had."""
        self._board.work_on(members, Kind.STEP, Phase.COMPUTING)
        self._in_backward = False
        for part in reversed(self._parts):  # shards are divided before anything is sent
            part.begin(members, number)
        share = self._part.share(members)
        self._count = share.count
        if self._incomplete is not None and any(is_compiled(module) for module in self.model.modules()):
            self._complete()  # nobody sees what the compiler has made of a model use parameters
        with self._part.collector.step(), in_time(self.model, self._together.limit):
            computed = batch.compute(self, share)
        self._begin_backward()  # it may have had no samples
        self._part.mark(self._part.collector.finish())
        self._report(computed)
        if members.first == self._row:
            self._decide(members)
        for part in self._parts:
            part.computed(members, number)
        computed_at = time.monotonic_ns()
        self._together.arrive(members, Phase.AWAITING_GRADIENTS)
        arrived_at = time.monotonic_ns()
        self._board.enter(self._row, Phase.UPDATING)
        check_options(self._board, members)
        closed, step = self._add_up(members, number)
        for part in self._parts:
            part.agree(step)
        self._hosts.decide(members)
        return closed, step, computed_at, arrived_at

    def _show_gradients(self, members: Members) -> None:
        """They are complete, and nobody has used them yet."""
        if self.gradients_ready is not None:
            self._hosts.meet()
            if members.first == self._row:
                self.gradients_ready()

    def _report(self, computed: Computed) -> None:
        self._optimizer.refresh_options()
        board, me = self._board, self._row
        part = computed.loss if self._part.speaks else NOTHING
        board.set(me, Word.OPTIONS, self._optimizer.options_fingerprint())
        leave_loss(board, me, part, computed.samples if self._part.speaks else 0)
        self._logged.leave(part)

    def _decide(self, members: Members) -> None:
        """The first member writes down what holds from this step on, before it arrives; all read it after they have."""
        board = self._board
        # One that was decided before, and is behind, is of a step that was given up.
        if board.host_get(HostWord.STOP_REQUESTED) and board.host_get(HostWord.STOP_AFTER) < members.op:
            board.host_set(HostWord.STOP_AFTER, members.op)
        ready = members.view is not None and board.host_get(HostWord.HOSTS_READY) == members.epoch
        ready &= not board.host_get(HostWord.CALLED)  # nobody could tell them what those calls have returned
        board.host_set(HostWord.LET_IN_AFTER, members.op if ready else 0)
        # Local statistics are the first member's. So are exact ones when a member had no samples in some pass and has
        # missed its statistics; the first has samples in every pass.
        taken_over = not self._statistics.exact or self._statistics.some_were_idle
        if taken_over:
            self._part.publish_buffers()
        board.host_set(HostWord.BUFFERS_OF, members.op if taken_over else 0)  # an earlier try may have said otherwise

    def _add_up(self, members: Members, number: int) -> tuple[Closed, DecidedStep]:
        """Returns what the step came to, over all hosts; and what is to be made of it here."""
        ranks = members.ranks
        here = totals = StepTotals.of_host(self._board, members, self._row)
        touched = self._shared.arena.touched[list(ranks)].amax(0)
        if self._hosts.several:
            own = here.numbers()
            summed = self._hosts.sum(torch.cat([own, touched.double()]))
            totals = StepTotals.of_numbers(summed)
            touched = self._hosts.touched(touched, summed[len(own) :])
            if totals.options != here.options * self._hosts.count:
                raise different_options(f"host {self._hosts.number}", "another host")
        if totals.sums and totals.means:
            raise differing_kinds(counted=self._board.get_float(self._row, Word.COUNT) >= 0)
        if totals.sums and not totals.counted:
            raise nothing_counted(number)
        logged = self._logged.add_up(ranks) if totals.logged else {}
        replicas = int(totals.members) // self._part.devices
        closed = Closed(totals.mean_loss, int(totals.samples), replicas, bool(totals.stop), logged)
        weights = self._hosts.weights(self._board, ranks, self._part.devices, here, totals)
        return closed, DecidedStep(members, number, touched.tolist(), weights, bool(totals.lets_in))

    # ── other calls of the script ────────────────────────────────────────────────────────────────────────

    def samples(self, chapter: Chapter) -> LedgerSamples:
        return LedgerSamples(chapter, self.share, self._settle)

    @contextmanager
    def _call(self, members: Members, kind: Kind, phase: Phase, awaiting: Phase) -> Iterator[None]:
        """A try of what all do together outside of steps; it is over when all hosts have all they need of it."""
        self._board.work_on(members, kind, phase)
        self._sums.begin(members, awaiting)
        self._hosts.enter(members)
        self._hosts.begin_call(kind)
        yield
        self._hosts.decide(members)

    def agree(self, call: ScriptCall) -> None:
        self._settle()

        def one_try(members: Members) -> None:
            with self._call(members, Kind.BATCHES, Phase.BETWEEN, Phase.AWAITING_OTHERS):
                self._compare(call, members)

        self._together.attempt(one_try)

    def _compare(self, call: ScriptCall, members: Members) -> None:
        rows = self._board.replicas
        number, count = self._hosts.number * rows + self._row, self._hosts.most * rows
        agree(call, lambda values: self._hosts.sum_in_call(self._sums.sum(values, members.ranks)), number, count)

    def sum(self, call: ScriptCall, compute: Callable[[BatchShare], torch.Tensor]) -> torch.Tensor:
        self._settle()

        def one_try(members: Members) -> torch.Tensor:
            with self._call(members, Kind.EVALUATE, Phase.EVALUATING, Phase.AWAITING_EVALUATION):
                self._compare(call, members)
                with in_time(self.model, self._together.limit):
                    found = compute(self._part.share(members))
                if not self._part.speaks:
                    found.zero_()
                check_in_time(self._together.limit)  # before the others have what they wait for
                return self._hosts.sum_in_call(self._sums.sum(found, members.ranks))

        total = self._together.attempt(one_try, limited=True)
        self._board.enter(self._row, Phase.BETWEEN)
        return total

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> dict[str, torch.Tensor]:
        self._complete()
        assert self._step is not None
        return self._whole.gradients(self._step)

    def optimizer_state(self) -> StateByName:
        self._complete()
        return self._whole.optimizer_state()

    def model_state(self) -> dict[str, torch.Tensor]:
        self._complete()
        return self._whole.model_state()

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        self._complete()
        self._whole.take(model, optimizer)

    def kept_by_hosts(self) -> dict[str, torch.Tensor]:
        return self._whole.kept

    def take_kept_by_hosts(self, saved: dict[str, torch.Tensor]) -> None:
        self._together.once(lambda: self._hosts.take(saved))

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._shared.arena.arena.close()
