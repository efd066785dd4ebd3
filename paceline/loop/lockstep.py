"""The course of a run in which all replicas take the same steps: in one process, and mirrored.

Every replica keeps a ledger of its own, and all stay equal. `batches` draws leases from it and yields this replica's
part of each; `step` computes it, lets the engine close the step, and commits the lease. The part is a function of how
many replicas there are, so when one dies the engine asks for the step again and gets a larger part of the very same
samples.

A script that is resumed, or a replica that is started again, runs from its first line like any other. What lies behind
the run's position is passed over (`ScriptPosition`): `batches` yields nothing for finished epochs, `evaluate` returns
what was recorded, `save` does nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import checkpoint
from paceline.data import Ahead, Feed, Lease, Ledger
from paceline.errors import PacelineError
from paceline.loop import training_state
from paceline.loop.course import Training
from paceline.loop.engine import Closed, Computed, Share
from paceline.loop.passes import Evaluation, MicroBatches, empty_like
from paceline.loop.recorder import open_recorder
from paceline.loop.script_position import ScriptPosition, with_one_more_step
from paceline.mirrored.opening import open_engine
from paceline.run_place import INTERRUPTED
from paceline.seeds import mixed
from paceline.split.cut import capture
from paceline.split.layout.show import tell_dims


@dataclasses.dataclass
class _Drawn:
    """A lease that was drawn and not yet committed."""

    lease: Lease
    feed: Feed
    ahead: Ahead
    share: Share
    micro_batches: list[Any]
    given: Any  # what the user got


class Lockstep:
    """How one replica, and all others with it, goes through the data."""

    def __init__(self, training: Training) -> None:
        self._model, self._optimizer, self._scheduler = training.model, training.optimizer, training.scheduler
        self._clip_norm, self._passes, self._place = training.clip_norm, training.passes, training.place
        self._engine = open_engine(self._model, self._optimizer, self._place)
        self._engine.notes_for_joining = self._notes_for_joining
        self._recorder = open_recorder(self._place.recording, self._engine, self._model)
        self._prepared = False
        self._drawn: _Drawn | None = None
        self._position = ScriptPosition()
        self._resumed_from: checkpoint.Checkpoint | None = None  # until the script has caught up with it

    @property
    def ledger(self) -> Ledger | None:
        return self._position.ledger

    @property
    def steps(self) -> int:
        return self._position.steps

    @property
    def chief(self) -> bool:
        return self._engine.chief

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def batches(self, feed: Feed, asked: Ledger, epochs: int, prefetch: int) -> Iterator[Any]:
        self._join_if_restarted()
        turned = self._position.turn_to(asked, epochs)
        if turned is None:
            return
        ledger, stop_epoch = turned
        if self._resumed_from is not None and not self._position.script_is_behind:
            # Only now: what the script has drawn on its way here, a split of the data say, it must draw as before.
            training_state.restore_random(self._resumed_from)
            self._resumed_from = None
        ahead = Ahead(feed, ledger, depth=prefetch)
        try:
            yield from self._draw(ledger, feed, ahead, stop_epoch)
        finally:
            ahead.close()

    def _draw(self, ledger: Ledger, feed: Feed, ahead: Ahead, stop_epoch: int) -> Iterator[Any]:
        if feed.length is not None:
            self._engine.expect(self.steps - ledger.step + _steps_until(ledger, stop_epoch))
        while True:
            lease = ledger.next()
            if lease.epoch >= stop_epoch:
                return
            available = feed.available(ledger, lease.epoch, range(lease.start, lease.stop))
            if available == 0 or (ledger.drop_last and available < lease.size):
                ledger.end_epoch(lease.epoch)
                continue
            lease = dataclasses.replace(lease, stop=lease.start + available)
            share = self._engine.share()
            following = ledger.peek(lease)
            ahead.want([self._request(lease, share), self._request(following, share)])
            micro_batches = ahead.take(*self._request(lease, share))
            given = MicroBatches(micro_batches)
            if self._passes.accumulate == 1:
                has_samples = bool(lease.parts(share.count)[share.index][0])
                given = micro_batches[0] if has_samples else empty_like(self._sample(feed, ledger, lease))
            self._drawn = _Drawn(lease, feed, ahead, share, micro_batches, given)
            yield given
            if self._drawn is not None:
                raise PacelineError(
                    f"the batch of update {lease.step} was drawn and never trained on: "
                    "give every batch to trainer.step, or end the loop"
                )

    def _sample(self, feed: Feed, ledger: Ledger, lease: Lease) -> Any:
        return feed.load(ledger, lease.epoch, range(lease.start, lease.start + 1))

    def _request(self, lease: Lease, share: Share) -> tuple[int, tuple[range, ...]]:
        return lease.epoch, tuple(lease.parts(share.count, self._passes.accumulate)[share.index])

    def step(self, batch: Any) -> float:
        drawn = self._drawn
        if drawn is None:
            raise PacelineError("trainer.step was given a batch that trainer.batches did not yield just now")
        changed = batch is not drawn.given
        if changed:
            drawn.micro_batches = list(batch) if self._passes.accumulate > 1 else [batch]
        number = self.steps

        def compute(share: Share) -> Computed:
            if share != drawn.share:
                if changed:
                    raise PacelineError(
                        "a replica died and its samples cannot be computed again, because the batch given to "
                        "trainer.step is not the one that trainer.batches yielded: transform it in the dataset or "
                        "in the loss"
                    )
                drawn.micro_batches = drawn.ahead.take(*self._request(drawn.lease, share))
                drawn.share = share
            return self._compute(drawn, number)

        self._prepare(lambda model: self._passes.loss(model, drawn.micro_batches[0]))
        closed = self._engine.step(number, compute, self._clip_norm)
        self._commit(drawn, closed)
        return closed.loss

    def _compute(self, drawn: _Drawn, number: int) -> Computed:
        """Forward and backward over this replica's part."""
        lease, share = drawn.lease, drawn.share
        parts = lease.parts(share.count, self._passes.accumulate)
        sizes = [len(part) for part in parts[share.index]]
        assert self.ledger is not None
        loss = self._passes.run(
            self._model,
            drawn.micro_batches,
            sizes,
            whole=lease.size,
            number=number,
            # A function of (seed, update, member): a step that is tried again after a death, or after a resume,
            # draws the same.
            seed=mixed(self.ledger.seed, number, share.index),
            around=lambda k, is_last: self._engine.one_pass(
                is_last=is_last, among=[member for member in range(share.count) if parts[member][k]]
            ),
            **({"train": self._engine.cut.train} if self._engine.cut is not None else {}),
        )
        return Computed(loss, sum(sizes))

    def _prepare(self, call: Callable[[nn.Module], Any]) -> None:
        """A model is cut when it is known what it will be called with."""
        if self._place.dims_to is not None:
            tell_dims(self._model, capture(self._model, call), self._place.dims, Path(self._place.dims_to))
            raise SystemExit(0)
        if self._engine.cut is not None and not self._prepared:
            self._engine.prepare(capture(self._model, call))
            self._prepared = True

    def _commit(self, drawn: _Drawn, closed: Closed) -> None:
        lease = drawn.lease
        if closed.samples != lease.size:
            raise PacelineError(f"{lease} was closed with {closed.samples} samples instead of {lease.size}")
        parts = lease.parts(closed.count, self._passes.accumulate)
        assert self.ledger is not None
        self.ledger.commit(lease, [part for member in parts for part in member])
        self._step_scheduler()
        self._drawn = None
        if self._recorder is not None:
            self._recorder.step_closed(closed.loss)
        if closed.stop:
            if self._place.save_on_stop:
                self.save(self._place.save_on_stop)
            raise SystemExit(INTERRUPTED)

    def _step_scheduler(self) -> None:
        step_scheduler(self._optimizer, self._scheduler)

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """It works only while it is called."""

    def evaluate(self, measure: Evaluation, length: int) -> Any:
        self._join_if_restarted()
        evaluation = self._position.next_evaluation()
        known, value = self._position.recorded(evaluation)
        if known:
            return value

        self._prepare(measure.call)

        def compute(share: Share) -> torch.Tensor:
            return measure.over(Lease(0, 0, 0, length).parts(share.count)[share.index][0])

        value = measure.mean(self._engine.total(compute))
        self._position.record(evaluation, value)
        return value

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's answer; all devices of a cut model ask together."""
        self._join_if_restarted()
        self._prepare(lambda model: model(*args, **kwargs))
        return self._model(*args, **kwargs)

    # ── saving and resuming ──────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        self._join_if_restarted()
        if self._position.script_is_behind:
            return

        def write() -> None:
            tensors, numbers = training_state.flatten(self._engine.optimizer_state())
            tensors |= training_state.random_tensors()
            notes = {**self._notes(), "numbers": numbers, "random": training_state.random_notes()}
            checkpoint.write(path, self._engine.model_state(), tensors, notes, keep=keep)

        self._engine.once(write)

    def resume(self, path: str | os.PathLike[str], fall_back: bool) -> bool:
        if self._engine.joining:
            return True  # takes over the state of the living instead
        if self._position.ledger is not None:
            raise PacelineError(f"trainer.resume({os.fspath(path)!r}) comes too late: call it before trainer.batches")
        if not Path(path).exists():
            return False
        saved = checkpoint.read(path, fall_back=fall_back)
        numbers = saved.notes.get("numbers", {})
        self._engine.take_state(saved.model, training_state.unflatten(saved.training, numbers))
        self._take_notes(saved.notes)
        self._resumed_from = saved
        return True

    def _notes(self) -> dict[str, Any]:
        """Everything about the run that is not a tensor."""
        return {
            **self._position.notes(),
            **training_state.schedule_and_options(self._optimizer, self._scheduler),
            "configuration": {"replicas": self._place.strategy.replicas, "accumulate": self._passes.accumulate},
        }

    def _take_notes(self, notes: dict[str, Any]) -> None:
        training_state.restore_options(self._optimizer, notes["options"])
        training_state.restore_schedule(self._scheduler, notes["scheduler"])
        self._position.resume(notes)

    def _notes_for_joining(self) -> dict[str, Any]:
        """The same in the middle of a step, before it is booked."""
        assert self._drawn is not None
        return {**self._notes(), "open_samples": self._drawn.lease.size}

    def _join_if_restarted(self) -> None:
        """A process that was started again takes its place among the living."""
        if not self._engine.joining:
            return
        notes = self._engine.join()
        # They were taken while the step was open that has now been closed: account for that one too.
        self._take_notes(with_one_more_step(notes, notes["open_samples"]))
        self._step_scheduler()

    def close(self) -> None:
        self._engine.close()


def step_scheduler(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    # A scheduler warns unless it has seen its optimizer step; here the owners' optimizers have.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    if scheduler is not None:
        scheduler.step()


def _steps_until(ledger: Ledger, epoch: int) -> int:
    assert ledger.length is not None
    whole, rest = divmod(ledger.length, ledger.batch_size)
    an_epoch = whole + (1 if rest and not ledger.drop_last else 0)
    done_of_this = -(-ledger.position // ledger.batch_size)
    return ledger.step - done_of_this + max(0, epoch - ledger.epoch) * an_epoch
