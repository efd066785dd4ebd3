"""The training loop: what goes on behind `Trainer`, whoever makes the steps.

    batches   draws samples from the engine's source, loads them ahead, gives them to the user
    step      has the engine compute and close the step, counts its samples, steps the scheduler
    evaluate  sums a metric over a dataset, by whoever computes which part
    save      has one process write the run's whole state; resume takes it over

A script that is resumed, or a replica that is started again, runs from its first line like any other. What lies behind
the run's position is passed over (`ScriptPosition`): `batches` yields nothing for finished epochs, `evaluate` returns
what was recorded, `save` does nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import checkpoint
from paceline.data.ahead import Ahead
from paceline.data.feed import Feed
from paceline.data.ledger import Ledger
from paceline.data.script_call import ScriptCall
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.exchange.board import called
from paceline.loop import run_state
from paceline.loop.batch import DrawnBatch, ReplicaBatch
from paceline.loop.engine import Chapter, Engine, Samples
from paceline.loop.evaluation import Evaluation, batch_loader, evaluation_of
from paceline.loop.kept_model import KeptModel
from paceline.loop.model_found import ModelFound, found_call
from paceline.loop.passes import Passes
from paceline.loop.recorder import open_recorder
from paceline.loop.returned_loss import read_loss
from paceline.loop.run_state import RunState, Schedule
from paceline.loop.script_position import ScriptPosition
from paceline.loop.step_clock import StepClock
from paceline.loop.telling import Telling, by_name
from paceline.optim.models import evaluating
from paceline.profile.trials import Trials
from paceline.run_place import INTERRUPTED, Place
from paceline.split.cut import call_model, first_call
from paceline.split.layout.show import tell_dims
from paceline.stoppable_calls import around
from paceline.verify.precision import AsItIs


@dataclass(frozen=True)
class Training:
    """What a script wants trained, and which process of the run this is."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    clip_norm: float | None
    passes: Passes
    place: Place
    precision: AsItIs
    trials: Callable[[Training, Feed, Ledger], Trials]  # of strategies, for a profile


class TrainingLoop:
    """How one process goes through the data."""

    def __init__(self, training: Training, open_engine: Callable[[Training], Engine]) -> None:
        engine = self.engine = open_engine(training)
        self._training = training
        self._model, self._optimizer = training.model, training.optimizer
        self._passes, self._place = training.passes, training.place
        self._schedule = Schedule(training.optimizer, training.scheduler)
        self._precision = training.precision
        self._recorder = open_recorder(self._place, engine, training.precision, training.optimizer)
        self._position = ScriptPosition()
        self._telling = Telling(training.place)
        self._clock = StepClock(self._place.run_folder, self._place.rank)
        self._chapter: Chapter | None = None  # in hand
        self._samples: Samples | None = None  # of that chapter
        self._drawn: DrawnBatch | None = None
        self._in_loop = False  # the script is between two batches
        self._call: ScriptCall | None = None  # the last of `batches`
        self._call_of_others: ScriptCall | None = None  # the same, when this process joined them
        self._saves = 0  # that the script has asked for
        self._has_saved = False  # and one of them has come to its end
        self.logged: dict[str, float] = {}  # in the last step, by the loss beside itself
        self._resumed: tuple[RunState, dict[str, torch.Tensor]] | None = None  # until the script has caught up with it
        engine.state_for_joining = self._state_for_joining
        self._kept = KeptModel(training.place, self._keep)

    @property
    def ledger(self) -> Ledger | None:
        return self.engine.ledger(self._position)

    @property
    def steps(self) -> int:
        return self.engine.steps(self._position)

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def batches(self, feed: Feed, asked: Ledger, epochs: int, prefetch: int) -> Iterator[Any]:
        if self._place.reaching is not None:
            return
        self._join_if_restarted()
        self._agree(feed, asked, epochs)
        turned = self._position.turn_to(asked, epochs)
        if turned is None:
            return
        if self.steps >= (self._place.most_steps or math.inf):  # an earlier run has made them all
            self._stop()
        self._clock.pause()
        self._go_on_with_random_numbers()
        ledger, stop_epoch = turned
        position, accumulate = self._position, self._passes.accumulate
        chapter = self._chapter = Chapter(position.chapter, feed, ledger, stop_epoch, position.steps_before, accumulate)
        if feed.length is not None:
            self.engine.expect(chapter.expected_steps)
        samples = self._samples = self.engine.samples(chapter)
        ahead = Ahead(feed, ledger, depth=prefetch * self.engine.at_once)
        try:
            while (drawn := self._draw(chapter, samples, ahead)) is not None:
                self._drawn, self._in_loop = drawn, True
                yield drawn.given
                if self._drawn is not None:
                    raise PacelineError(
                        f"the batch of update {drawn.batches[0].work.step} was drawn and never trained on: give every "
                        "batch to trainer.step, or end the loop"
                    )
        finally:
            self._in_loop = False
            ahead.close()
            samples.close()
        self._schedule.catch_up(self.steps)
        self._tell_of_servers()
        if samples.stopped:
            self._stop()

    def _agree(self, feed: Feed, asked: Ledger, epochs: int) -> None:
        """Compares what this call of `batches` asks for with what it does in the other replicas."""
        clip_norm, scheduler = self._training.clip_norm, self._training.scheduler
        call = self._call = msgspec.structs.replace(
            self.describe_call("batches", feed),
            number=self._call.number + 1 if self._call is not None else 1,
            seed=asked.seed if isinstance(asked.seed, int) and abs(asked.seed) < 1 << 63 else repr(asked.seed),
            batch_size=asked.batch_size,
            epochs=epochs,
            shuffle=asked.shuffle,
            drop_last=asked.drop_last,
            accumulate=self._passes.accumulate,
            clip_norm=None if clip_norm is None else float(clip_norm),
            scheduler=None if scheduler is None else type(scheduler).__name__,
        )
        others = self._call_of_others
        if others is None or call.number > others.number:
            self.engine.agree(call)
        elif call.number == others.number and (difference := call.difference(others)) is not None:
            raise difference

    def describe_call(self, name: Literal["batches", "evaluate"], feed: Feed) -> ScriptCall:
        """Returns what can be said of any such call."""
        place = self._place
        who = called(place.rank, place.strategy.devices)
        return ScriptCall(who=who, name=name, length=feed.length, dataset=feed.description())

    def _draw(self, chapter: Chapter, samples: Samples, ahead: Ahead) -> DrawnBatch | None:
        works = samples.next()
        if not works:
            return None
        self._schedule.catch_up(works[0].step)
        following = [samples.following(work) for work in works]
        ahead.want([*(work.request for work in works), *(request for after in following for request in after)])
        drawn = zip(works, following, strict=True)
        return DrawnBatch([ReplicaBatch(work, after, chapter, samples, ahead, self._passes) for work, after in drawn])

    def step(self, batch: Any) -> float:
        drawn, samples, chapter = self._drawn, self._samples, self._chapter
        if drawn is None or samples is None or chapter is None:
            raise PacelineError("trainer.step was given a batch that trainer.batches did not yield just now")
        drawn.take(batch)
        came_at = time.monotonic()
        self._prepare(drawn.batches[0].micro_batches[0], drawn, chapter)
        began_at = time.monotonic()
        were_consistent, self._kept.consistent = self._kept.consistent, False
        try:
            closed = self.engine.step(drawn.batches)
        except DeadlineExceeded:  # nothing has changed, and its samples are drawn again
            self._drawn, self._kept.consistent = None, were_consistent
            raise
        self._kept.consistent = True
        self._telling.began(began_at, began_at - came_at if self._place.strategy.split is not None else None)
        samples.commit(closed)
        self._drawn, self.logged = None, dict(closed.logged)
        self._clock.step_ended()
        self._schedule.catch_up(self.steps)
        self._recorder.step_closed(
            closed,
            lambda: self._loss_in_eval_mode(drawn, chapter),
            lambda: self._answers_in_eval_mode(drawn, chapter),
        )
        if closed.stop or self.steps >= (self._place.most_steps or math.inf):
            self._stop()
        return closed.loss

    def _prepare(self, batch: Any, drawn: DrawnBatch, chapter: Chapter) -> None:
        """A model is cut when it is known what will be computed."""
        if not self._model.training:
            self._model.train()
        if self._place.serving is not None:
            raise ModelFound(self._model, self._place.dims, found_call(self._passes.loss, self._model, batch))
        if self._place.dims_to is not None:
            tell_dims(self._passes.loss, self._model, batch, self._place.dims, Path(self._place.dims_to))
            raise SystemExit(0)
        if (request := self._place.profiling) is not None:
            from paceline.profile.profiler import Profiler, tell_profile
            from paceline.profile.step_times import StepWork

            work = StepWork(self._passes.loss, self._model, batch, lambda returned: read_loss(returned, "in a profile"))
            trials = self._training.trials(self._training, chapter.feed, chapter.ledger)
            profiler = Profiler(work, self._optimizer, request, self._place.dims, self._passes.accumulate, trials)
            steps = chapter.expected_steps if chapter.feed.length is not None else None
            tell_profile(profiler, chapter.feed, chapter.ledger, drawn.batches[0].work.epoch, steps, Path(request.path))
            raise SystemExit(0)
        self.engine.prepare(self._passes.loss, batch)

    def _stop(self) -> None:
        """The run was asked to stop."""
        if self._place.save_on_stop:
            self.save(self._place.save_on_stop)
        raise SystemExit(INTERRUPTED)

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, evaluation: Evaluation, name: str | None) -> Any:
        """`name`: under which it is told."""
        self._clock.pause()
        value = self._evaluate(evaluation, name)
        self._recorder.evaluated(value)
        return value

    def log(self, values: dict[str, float]) -> None:
        """Tells numbers of the script's own. One that is started again passes over those that lie behind."""
        engine, position = self.engine, self._position
        self._telling.logged(
            position.place(in_step=engine.in_step),
            values,
            self.steps,
            in_loop=self._in_loop,
            in_step=engine.in_step,
            behind=engine.joining or position.script_is_behind,
        )

    def _tell_of_servers(self) -> None:
        if self._telling.listened_to and self.engine.in_charge and (servers := self.engine.servers) is not None:
            self._telling.account(servers.account())

    def _loss_in_eval_mode(self, drawn: DrawnBatch, chapter: Chapter) -> float:
        """Returns the mean loss over a batch that was trained on, computed as `evaluate` computes a metric."""
        call = self.describe_call("evaluate", chapter.feed)
        self.engine.rest()
        with evaluating(self._model), torch.no_grad():
            value = self._evaluate(
                evaluation_of(self._passes.loss, self.engine.compute, drawn.batches[0], chapter, call)
            )
        return float(value)

    def _answers_in_eval_mode(self, drawn: DrawnBatch, chapter: Chapter) -> dict[str, Any]:
        """Returns what the model answers if it is called as the loss calls it, on a pass of a batch that was trained
        on: to the one in charge alone, and to all devices of a replica together. Right after the loss in eval mode."""
        if chapter.feed.length is None:  # a stream has forgotten the batch
            return {}
        load, whole = batch_loader(drawn.batches[0], chapter)
        call = first_call(self._passes.loss, self._model, load(range(-(-whole // chapter.accumulate))))
        with evaluating(self._model), torch.no_grad():
            answers = {"together": self.engine.compute(call_model, call)}
        if self.engine.in_charge:
            with self.engine.whole_model() as model, evaluating(model), torch.no_grad():
                answers["alone"] = call_model(model, call)
        return answers

    def _evaluate(self, evaluation: Evaluation, name: str | None = None) -> Any:
        self._join_if_restarted()
        key = self._position.next_evaluation(in_step=self.engine.in_step)
        result, told = self._position.recorded(key), self._position.result(key) is not None
        if result is None or result.names is None:
            if result is not None:
                sums = torch.tensor(result.sums)
            else:
                try:
                    sums = self.engine.total(key, evaluation.script_call, evaluation.over)
                except DeadlineExceeded:
                    self._position.undo_evaluation(key)
                    raise
            result = evaluation.result(key, sums)
            self._position.results.append(result)
        value = evaluation.value(result)
        if name is not None and not told:
            self._telling.evaluated(key, by_name(name, value), self.steps)
            self._tell_of_servers()
        return value

    def predict_alone(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], stopping: AbstractContextManager[Any]
    ) -> Any:
        """Returns what this method of the whole model answers, to this process alone; inside `stopping`."""
        self._join_if_restarted()
        self.engine.rest()
        args, kwargs = self._precision.convert((args, kwargs))
        with (
            self.engine.whole_model() as model,
            evaluating(model),
            torch.no_grad(),
            self._precision.watching(),
            around(model, stopping),
        ):
            answer = getattr(model, method)(*args, **kwargs)
        self._recorder.predicted(answer)
        return answer

    def predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the model's answer; all devices of a cut model ask together."""
        self._join_if_restarted()
        self.engine.meet_devices()
        args, kwargs = self._precision.convert((args, kwargs))
        with self._precision.watching():
            answer = self.engine.compute(call_model, (args, kwargs))
        self._recorder.predicted(answer)
        return answer

    # ── saving and resuming ──────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        # What is only looked at leaves the user's files alone: other runs may go on from them, these here among them.
        if self._place.reaching is not None or not self._place.checkpoints:
            return
        self._join_if_restarted()
        self._clock.pause()
        self._saves += 1
        if not self._position.script_is_behind:
            self.engine.rest()
            self.engine.once(self._saves, lambda: self._save(path, keep))
        self._has_saved = True

    def _save(self, path: str | os.PathLike[str], keep: int) -> None:
        self._write(path, keep)
        self._telling.saved(path)

    def _write(self, path: str | os.PathLike[str], keep: int) -> None:
        model, optimizer, state = self.engine.snapshot(self._state())
        tensors, numbers = run_state.flatten(optimizer)
        tensors[run_state.RANDOM_STATE] = torch.get_rng_state()
        tensors |= {run_state.HOSTS + name: value for name, value in self.engine.kept_by_hosts().items()}
        state = msgspec.structs.replace(state, numbers=numbers, random=run_state.random_numbers())
        checkpoint.write(path, model, tensors, msgspec.to_builtins(state), keep=keep)

    def _keep(self, path: Path) -> None:
        """Saves what the script has forgotten to save; the one in charge does, for all."""
        if not self._has_saved and self.engine.in_charge:
            self._write(path, keep=1)

    def resume(self, path: str | os.PathLike[str], fall_back: bool) -> bool:
        if self._place.serving is not None or not self._place.checkpoints:
            return False  # training need not be over before there is a first batch; or it begins anew
        if self.engine.joining:
            return True  # takes over the state of the living instead
        if self._position.ledger is not None:
            raise PacelineError(f"trainer.resume({os.fspath(path)!r}) comes too late: call it before trainer.batches")
        if self._place.reaching is not None or not Path(path).exists():
            return False
        saved = checkpoint.read(path, fall_back=fall_back)
        state = run_state.read_state(saved)
        with run_state.named(saved.path):
            model, training = self._precision.state(saved.model), self._precision.state(saved.training)
            self.engine.take_state(model, run_state.unflatten(training, state.numbers), state)
            self.engine.take_kept_by_hosts(run_state.of_hosts(training))
            self._take(state)
        self._resumed = (state, saved.training)
        return True

    def _go_on_with_random_numbers(self) -> None:
        # Only now: what the script has drawn on its way here, a split of the data say, it must draw as before.
        if self._resumed is not None and not self._position.script_is_behind:
            run_state.restore_random(*self._resumed)
            self._resumed = None

    def _state(self) -> RunState:
        return RunState(
            **self._position.progress(),
            logs=self._telling.calls_at(self._position.place(in_step=self.engine.in_step)),
            options=run_state.group_options(self._optimizer),
            schedule=self._schedule.state(),
            replicas=self._place.strategy.replicas,
            accumulate=self._passes.accumulate,
        )

    def _take(self, state: RunState) -> None:
        run_state.restore_options(self._optimizer, state.options)
        self._schedule.load(state.schedule, state.step)
        self._position.resume(state)
        if state.ledger is not None:
            self._telling.resume((state.chapter, state.ledger.epoch, state.ledger.position), state.logs)

    def _state_for_joining(self) -> RunState:
        """The same in the middle of a step, before it is counted."""
        assert self._drawn is not None
        return msgspec.structs.replace(self._state(), open_samples=self._drawn.batches[0].work.whole, call=self._call)

    def _join_if_restarted(self) -> None:
        """A process that was started again takes its place among the living."""
        if self.engine.joining:
            state = self.engine.join()
            # It was taken while the step was open that has now been closed: account for that one too.
            self._take(state)
            self._position.resume(state.with_open_step())
            self._call_of_others = state.call
            self._schedule.catch_up(state.step + 1)
            if self.steps >= (self._place.most_steps or math.inf):
                self._stop()

    def close(self) -> None:
        self._kept.keep()
        self.engine.close()
