"""`Trainer`: the loop a user writes stays plain; where the work happens is somebody else's decision.

    for batch in trainer.batches(train_set, batch_size=256, epochs=5):
        trainer.step(batch)

`batches` draws leases from the ledger and yields this replica's part of each; `step` computes it, lets the engine
close the step, and commits the lease. The part is a function of how many replicas there are, so when one dies the
engine asks for the step again and gets a larger part of the very same samples.

A script that is resumed, or a replica that is started again, runs from its first line like any other. What lies
behind the run's position is passed over (`Itinerary`): `batches` yields nothing for finished epochs, `evaluate`
returns what was recorded, `save` does nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from paceline import checkpoint, training_state
from paceline.data import Ahead, Feed, Lease, Ledger, open_feed
from paceline.errors import DataError, LossError, PacelineError, StrategyError
from paceline.itinerary import Itinerary, with_one_more_step
from paceline.launch.place import Place, find_place
from paceline.owners.engine import Closed, Computed, Share
from paceline.owners.opening import open_engine
from paceline.strategy import Mirrored
from paceline.verify.recorder import Recorder

Loss = Callable[[nn.Module, Any], torch.Tensor]
Metric = Callable[[nn.Module, Any], Any]

INTERRUPTED = 130


class MicroBatches(list[Any]):
    """This replica's part of a batch, cut for gradient accumulation. `Trainer.step` takes it as a whole."""


@dataclasses.dataclass
class _Drawn:
    """A lease that was drawn and not yet committed."""

    lease: Lease
    feed: Feed
    ahead: Ahead
    share: Share
    micro_batches: list[Any]
    given: Any  # what the user got


class Trainer:
    """Trains `model` with `optimizer` on `loss(model, batch)`, the mean loss over the samples of a batch.

    In one process this is plain torch. Under `paceline run` the same script is one of several replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        strategy: Mirrored | None = None,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        """`scheduler` is stepped after every update and saved with the run. `clip_norm` bounds the length of the
        whole gradient. `accumulate` computes a batch in that many passes, to need less memory."""
        if clip_norm is not None and not clip_norm > 0:
            raise StrategyError("clip_norm", clip_norm, "give a number above 0, or None")
        if accumulate < 1:
            raise StrategyError("accumulate", accumulate, "give a whole number of passes from 1 up")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise StrategyError(
                "scheduler",
                "ReduceLROnPlateau",
                "step it yourself with your metric, or give one that counts updates",
            )
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._scheduler = scheduler
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        self._place = _settled(find_place(), strategy)
        self._engine = open_engine(model, optimizer, self._place)
        self._engine.notes_for_joining = self._notes_for_joining
        recording = self._place.recording
        self._recorder = Recorder(recording, self._engine, model) if recording is not None else None
        self._drawn: _Drawn | None = None
        self._itinerary = Itinerary()
        self._resumed_from: checkpoint.Checkpoint | None = None  # until the script has caught up with it

    # ── what a user may ask ──────────────────────────────────────────────────────────────────────────────

    @property
    def ledger(self) -> Ledger:
        """Which samples have been counted. `trainer.ledger.check()` proves that each was, once."""
        if self._itinerary.ledger is None:
            raise PacelineError("trainer.ledger is empty: it begins with the first call of trainer.batches")
        return self._itinerary.ledger

    @property
    def steps(self) -> int:
        """Updates made so far, over the whole run, resumed parts included."""
        return self._itinerary.steps

    @property
    def replica(self) -> int:
        """Number of this replica among all; 0 in one process."""
        return self._place.rank

    @property
    def replicas(self) -> int:
        """How many replicas the run was started with."""
        return self._place.world

    @property
    def chief(self) -> bool:
        """Whether this replica should print, log and write: true for exactly one of them."""
        return self._engine.chief

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
    ) -> Iterator[Any]:
        """This replica's part of each batch of `batch_size` samples; one update a batch, every sample once an epoch.

        `dataset`: a tensor, a tuple of tensors, a map-style dataset, or an iterable. The order follows from `seed`
        and the epoch. Calling this again with the same arguments goes on with the next epochs.
        """
        if isinstance(batch_size, int) and batch_size < self._place.world:
            raise DataError(
                "batch_size", batch_size, f"give at least one sample for each of the {self._place.world} replicas"
            )
        if epochs < 0:
            raise DataError("epochs", epochs, "give a whole number from 0 up")
        feed = open_feed(dataset, collate)
        self._join_if_restarted()
        asked = Ledger(feed.length, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
        turned = self._itinerary.turn_to(asked, epochs)
        if turned is None:
            return
        ledger, stop_epoch = turned
        if self._resumed_from is not None:
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
            if self._accumulate == 1:
                given = micro_batches[0] if self._has_samples(lease, share) else _empty_like(self._sample(feed, lease))
            self._drawn = _Drawn(lease, feed, ahead, share, micro_batches, given)
            yield given
            if self._drawn is not None:
                raise PacelineError(
                    f"the batch of update {lease.step} was drawn and never trained on: "
                    "give every batch to trainer.step, or end the loop"
                )

    def _has_samples(self, lease: Lease, share: Share) -> bool:
        return bool(lease.parts(share.count)[share.index][0])

    def _sample(self, feed: Feed, lease: Lease) -> Any:
        return feed.load(self.ledger, lease.epoch, range(lease.start, lease.start + 1))

    def _request(self, lease: Lease, share: Share) -> tuple[int, tuple[range, ...]]:
        return lease.epoch, tuple(lease.parts(share.count, self._accumulate)[share.index])

    def step(self, batch: Any) -> float:
        """Train on a batch that `batches` yielded. Returns the mean loss over the whole batch."""
        drawn = self._drawn
        if drawn is None:
            raise PacelineError("trainer.step was given a batch that trainer.batches did not yield just now")
        changed = batch is not drawn.given
        if changed:
            drawn.micro_batches = list(batch) if self._accumulate > 1 else [batch]
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

        closed = self._engine.step(number, compute, self._clip_norm)
        self._commit(drawn, closed)
        return closed.loss

    def _compute(self, drawn: _Drawn, number: int) -> Computed:
        """Forward and backward over this replica's part."""
        lease, share = drawn.lease, drawn.share
        parts = lease.parts(share.count, self._accumulate)
        sizes = [len(part) for part in parts[share.index]]
        passes = [k for k, size in enumerate(sizes) if size]
        total = 0.0
        self.model.train()
        outside = torch.get_rng_state()
        # Random numbers inside a step are a function of (seed, update, member): a step that is tried again after a
        # death, or after a resume, draws the same.
        _seed(_mixed(self.ledger.seed, number, share.index))
        try:
            for k in passes:
                among = [member for member in range(share.count) if parts[member][k]]
                with self._engine.one_pass(is_last=k == passes[-1], among=among):
                    loss = self._loss(self.model, drawn.micro_batches[k])
                    value = self._checked(loss, number)
                    weight = sizes[k] / lease.size
                    (loss * weight if weight != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
                    total += value * weight
        finally:
            torch.set_rng_state(outside)
        return Computed(total, sum(sizes))

    def _checked(self, loss: Any, number: int) -> float:
        where = f"at step {number} on replica {self.replica}"
        if not isinstance(loss, torch.Tensor):
            raise LossError("loss", type(loss).__name__, f"return a scalar tensor ({where})")
        if loss.numel() != 1:
            raise LossError("loss", f"a tensor of shape {tuple(loss.shape)}", f"return its mean, a scalar ({where})")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise LossError("loss", value, f"it must be finite ({where}); lower the learning rate or look at the data")
        return value

    def _commit(self, drawn: _Drawn, closed: Closed) -> None:
        lease = drawn.lease
        if closed.samples != lease.size:
            raise PacelineError(f"{lease} was closed with {closed.samples} samples instead of {lease.size}")
        self._book(lease, closed.count)
        self._drawn = None
        if self._recorder is not None:
            self._recorder.step_closed(closed.loss)
        if closed.stop:
            if self._place.save_on_stop:
                self.save(self._place.save_on_stop)
            raise SystemExit(INTERRUPTED)

    def _book(self, lease: Lease, count: int) -> None:
        parts = lease.parts(count, self._accumulate)
        self.ledger.commit(lease, [part for member in parts for part in member])
        self._step_scheduler()

    def _step_scheduler(self) -> None:
        # A scheduler warns unless it has seen its optimizer step; here the owners' optimizers have.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._scheduler is not None:
            self._scheduler.step()

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, dataset: Any, metric: Metric, *, batch_size: int = 256, collate: Any = None) -> Any:
        """The mean of `metric(model, batch)` over all samples: a number, or a dict of numbers.

        The model is in eval mode and the samples are divided among the replicas.
        """
        self._join_if_restarted()
        evaluation = self._itinerary.next_evaluation()
        known, value = self._itinerary.recorded(evaluation)
        if known:
            return value
        feed = open_feed(dataset, collate)
        if feed.length is None:
            raise DataError("dataset", type(dataset).__name__, "evaluate on one that has a length")
        ledger = Ledger(feed.length, batch_size, shuffle=False)
        names: list[str | None] = []

        def compute(share: Share) -> torch.Tensor:
            return self._measure(metric, feed, ledger, share, names)

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                sums = self._engine.total(compute)
        finally:
            self.model.train(was_training)
        means = [float(total) / ledger.length for total in sums[: len(names)]]  # type: ignore[operator]
        value = means[0] if names == [None] else dict(zip(names, means, strict=True))
        self._itinerary.record(evaluation, value)
        return value

    def _measure(
        self, metric: Metric, feed: Feed, ledger: Ledger, share: Share, names: list[str | None]
    ) -> torch.Tensor:
        """Sums of the metric's values over this replica's batches."""
        assert ledger.length is not None
        whole = Lease(0, 0, 0, ledger.length).parts(share.count)[share.index][0]
        sums: list[float] = []
        # One with no samples at all still has to know how many numbers the metric gives.
        for start in range(whole.start, whole.stop, ledger.batch_size) or [0]:
            part = range(start, min(start + ledger.batch_size, whole.stop) if whole else min(1, ledger.length))
            value = metric(self.model, feed.load(ledger, 0, part))
            named = value if isinstance(value, dict) else {None: value}
            if not sums:
                sums = [0.0] * len(named)
                names[:] = list(named)
            for index, number in enumerate(named.values()):
                sums[index] += float(number) * (len(part) if whole else 0)
        return torch.tensor(sums, dtype=torch.float64)

    # ── saving and resuming ──────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str], *, keep: int = 2) -> None:
        """Save the model, and everything needed to go on, as a checkpoint at `path`; the one before is kept.

        `path` itself is a safetensors file with the model's own state_dict.
        """
        self._join_if_restarted()
        if self._itinerary.script_is_behind:
            return

        def write() -> None:
            tensors, numbers = training_state.flatten(self._engine.optimizer_state())
            tensors |= training_state.random_tensors()
            notes = {**self._notes(), "numbers": numbers, "random": training_state.random_notes()}
            checkpoint.write(path, training_state.model_tensors(self.model), tensors, notes, keep=keep)

        self._engine.once(write)

    def resume(self, path: str | os.PathLike[str], *, fall_back: bool = False) -> bool:
        """Go on where the checkpoint at `path` was saved; call it before `batches`.

        Returns False, and does nothing, if there is no such file. A damaged file is refused; with `fall_back` the
        one saved before it is used.
        """
        if self._engine.joining:
            return True  # takes over the state of the living instead
        if self._itinerary.ledger is not None:
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
            **self._itinerary.notes(),
            "options": training_state.group_options(self.optimizer),
            "scheduler": training_state.schedule_notes(self._scheduler),
            "configuration": {"replicas": self.replicas, "accumulate": self._accumulate},
        }

    def _take_notes(self, notes: dict[str, Any]) -> None:
        training_state.restore_options(self.optimizer, notes["options"])
        training_state.restore_schedule(self._scheduler, notes["scheduler"])
        self._itinerary.resume(notes)

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
        """Let go of shared memory. Not needed at the end of a script."""
        self._engine.close()


def _settled(place: Place, strategy: Mirrored | None) -> Place:
    """The place, with the script's own strategy if it names one: it must be what was started."""
    if strategy is None:
        return place
    if strategy.replicas != place.world:
        raise StrategyError(
            "replicas",
            strategy.replicas,
            f"this run has {place.world}; start it with `paceline run SCRIPT --replicas {strategy.replicas}`",
        )
    return place


def _empty_like(batch: Any) -> Any:
    """The same kind of batch with no samples: for a replica that has none in a last, small batch."""
    return tree_map(lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch)


def _steps_until(ledger: Ledger, epoch: int) -> int:
    assert ledger.length is not None
    whole, rest = divmod(ledger.length, ledger.batch_size)
    an_epoch = whole + (1 if rest and not ledger.drop_last else 0)
    done_of_this = -(-ledger.position // ledger.batch_size)
    return ledger.step - done_of_this + max(0, epoch - ledger.epoch) * an_epoch


def _seed(seed: int) -> None:
    """`torch.manual_seed`, but without its notes to devices not in use, which take longer than a small step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def _mixed(*numbers: int) -> int:
    """A seed from several numbers, so that neighbouring ones have nothing in common (splitmix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF
