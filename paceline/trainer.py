"""`Trainer`: the loop a user writes stays plain; where the work happens is somebody else's decision.

    for batch in trainer.batches(train_set, batch_size=256, epochs=5):
        trainer.step(batch)

What goes on behind it is one training loop (`loop/training_loop.py`), with an engine that follows from how the script
was started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data import Feed, Ledger, open_feed
from paceline.data.script_call import describe_function
from paceline.data.settings import DataSettings
from paceline.data.settings import settle as settle_data
from paceline.deadlines import refuse_deadline, shortest
from paceline.errors import DataError, ModelError, PacelineError, StrategyError
from paceline.loop.engine import ServersControl
from paceline.loop.evaluation import Evaluation, Metric
from paceline.loop.model_found import ModelFound
from paceline.loop.passes import Passes
from paceline.loop.reached import EvaluationReached
from paceline.loop.telling import check_name, check_values
from paceline.loop.training_loop import Training, TrainingLoop
from paceline.opening import open_engine
from paceline.optim.host_copy import check_device
from paceline.optim.models import evaluating
from paceline.rules import Rule
from paceline.run_place import find_place, settle
from paceline.split.cut import Loss
from paceline.step_trials import StepTrials
from paceline.stoppable_calls import StoppableCalls, around
from paceline.strategy import Strategy, limited
from paceline.trial_values import find_trial
from paceline.verify.precision import open_precision


class Trainer:
    """Trains `model` with `optimizer` on `loss(model, batch)`, the mean loss over the samples of a batch.

    A mean over anything else is returned as `(sum, count)`: a scalar tensor, and of how many tokens, pixels or pairs it
    is the sum. A dict with that as `loss` may hold further numbers, whose means are in `logged`.

    In one process this is plain torch. Under `paceline run` the same script is one of several replicas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        strategy: Strategy | None = None,
        scheduler: LRScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        dims: Mapping[str, str] | None = None,
    ) -> None:
        """`scheduler` is stepped after every update and saved with the run. `clip_norm` bounds the length of the
        whole gradient. `accumulate` computes a batch in that many passes, to need less memory. `dims` names the dims of
        parameters for `--layout`, by pattern: {"blocks.*.fc1.weight": "hidden embed"}; `paceline dims` shows them."""
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
        self._place = msgspec.structs.replace(settle(find_place(), strategy), dims=dict(dims or {}))
        if self._place.serving == "trainer":
            raise ModelFound(model, self._place.dims, None)
        if self._place.accelerators:
            check_device(model, self._place.accelerator)
        precision = self._precision = open_precision(
            self._place.recording, is_reference=self._place.started_by == "reference"
        )
        precision.prepare(model, optimizer)
        passes = Passes(precision.of(loss), accumulate, self._place.slow)
        training = Training(model, optimizer, scheduler, clip_norm, passes, self._place, precision, StepTrials)
        self._loop = TrainingLoop(training, open_engine)
        self._calls = StoppableCalls()  # of the model, beside its training

    # ── what a user may ask ──────────────────────────────────────────────────────────────────────────────

    @property
    def ledger(self) -> Ledger:
        """Which samples have been counted. `trainer.ledger.check()` proves that each was, once."""
        ledger = self._loop.ledger
        if ledger is None:
            raise PacelineError("trainer.ledger is empty: it begins with the first call of trainer.batches")
        return ledger

    @property
    def steps(self) -> int:
        """Updates made so far, over the whole run, resumed parts included."""
        return self._loop.steps

    @property
    def replica(self) -> int:
        """Number of this replica among all; 0 in one process."""
        return self._place.replica

    @property
    def device(self) -> int:
        """Which of its replica's devices this process is; 0 unless the model is cut."""
        return self._place.device

    @property
    def replicas(self) -> int:
        """How many replicas the run was started with."""
        return self._place.strategy.replicas

    @property
    def logged(self) -> dict[str, float]:
        """Means over the whole batch of the last step, of what the loss has returned beside itself."""
        return self._loop.logged

    @property
    def chief(self) -> bool:
        """Whether this replica should print, log and write: true for exactly one of them."""
        return self._loop.engine.in_charge

    @property
    def rule(self) -> Rule:
        """When servers close a step. May be set at any time, by any replica: it holds for all."""
        return self._servers("rule").rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._servers("rule").rule = rule

    @property
    def accepting(self) -> int:
        """How many gradients make a step now: with `--accept auto` that changes, and so it does when replicas die."""
        return self._servers("accepting").accepting

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients had which staleness: steps that were made between their pull and their push."""
        return self._servers("staleness").staleness

    def _servers(self, field: str) -> ServersControl:
        servers = self._loop.engine.servers
        if servers is None:
            raise StrategyError(field, "set", "only servers have one; start with `paceline run SCRIPT --servers 1`")
        return servers

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int | None = None,
        prefetch: int = 2,
    ) -> Iterator[Any]:
        """This replica's part of each batch of `batch_size` samples; one update a batch, every sample once an epoch.

        `dataset`: a tensor, a tuple or dict of tensors, a map-style dataset, an iterable, or a DataLoader, whose
        settings then hold where they are not given here. The order follows from `seed` and the epoch; `shuffle` is
        True and `drop_last` False unless said otherwise. Calling this again with the same arguments goes on with the
        next epochs.

        `workers` processes load the samples of a map-style dataset. What it draws at random there follows from
        (seed, epoch, sample), so that results do not depend on the number of workers or replicas.

        With `--in-graph` this process is several replicas: a batch is then a list of theirs, and `step` takes the
        list (one that has been changed must be as long).
        """
        asked = settle_data(DataSettings(dataset, batch_size, shuffle, drop_last, collate, workers))
        if asked.batch_size is None:
            raise DataError("batch_size", None, "give the number of samples of an update, or a DataLoader that has one")
        in_step = self._place.servers is None and not self._place.strategy.on_servers
        if isinstance(asked.batch_size, int) and asked.batch_size < self.replicas and in_step:
            raise DataError(
                "batch_size", asked.batch_size, f"give at least one sample for each of the {self.replicas} replicas"
            )
        if epochs < 0:
            raise DataError("epochs", epochs, "give a whole number from 0 up")
        with self._open_feed(asked) as feed:
            ledger = Ledger(
                feed.length,
                asked.batch_size,
                seed=seed,
                shuffle=asked.shuffle is not False,
                drop_last=bool(asked.drop_last),
            )
            yield from self._loop.batches(feed, ledger, epochs, prefetch)

    def _open_feed(self, asked: DataSettings) -> Feed:
        # Workers are not part of what was measured out for replicas: they go wherever the supervisor may.
        pinned = self._place.started_by == "paceline run" and self._place.run_folder is not None
        cores = os.sched_getaffinity(os.getppid()) if pinned and asked.workers else ()
        return open_feed(
            asked.dataset,
            asked.collate,
            asked.workers or 0,
            begin_worker=asked.begin_worker,
            cores=cores,
            convert=self._precision.convert,
        )

    def step(self, batch: Any) -> float:
        """Train on a batch that `batches` yielded. Returns the mean loss over the whole batch."""
        self._check_deadline("a training step")
        self._calls.settle()
        return self._loop.step(batch)

    def _check_deadline(self, what: str) -> None:
        """Refuses to give up a call where that would leave something half done."""
        place = self._place
        if (why := limited(place.strategy, place.hosts, restarts=place.restarts)) is not None:
            refuse_deadline(f"{what} {why}", "leave the deadline out around it; paceline run --longest limits a run")

    def evaluate(
        self,
        dataset: Any,
        metric: Metric,
        *,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int | None = None,
        name: str | None = None,
    ) -> Any:
        """The mean of `metric(model, batch)` over all samples: a number, or a dict of numbers. A mean over anything
        else is returned by the metric as `(sum, count)`.

        With a `name` the run tells it, once: in its events, its display, its summary, and to `--until`. Of a dict each
        number is `name/key`.

        The model is in eval mode and the samples are divided among the replicas, in batches of at most `batch_size`
        (256, or that of a DataLoader). `workers` processes load them.
        """
        self._check_deadline("an evaluation")
        asked = settle_data(DataSettings(dataset, batch_size, collate=collate, workers=workers))
        if name is not None:
            check_name("name of the evaluation", name)
        if asked.drop_last:
            raise DataError("drop_last of the DataLoader", True, "evaluate counts every sample, leave it out")
        at_once = 256 if asked.batch_size is None else asked.batch_size
        if (wanted := self._place.reaching) is not None and name is not None and wanted.name in (None, name):
            raise EvaluationReached(self.model, self._loss, metric, asked, at_once, name)
        with self._open_feed(asked) as feed:
            evaluation = self._evaluation(feed, metric, at_once)
            self._loop.engine.rest()
            if shortest() is not None and self._place.world == 1 and not self._place.strategy.on_servers:
                self._sum_up_in_time(evaluation)
            self._calls.settle()
            with evaluating(self.model), torch.no_grad():
                return self._loop.evaluate(evaluation, name)

    def _evaluation(self, feed: Feed, metric: Metric, at_once: int) -> Evaluation:
        if feed.length is None:
            raise DataError("dataset", feed.kind, "evaluate on one that has a length")
        ledger = Ledger(feed.length, at_once, shuffle=False)
        load = lambda part: feed.load(ledger, 0, part)  # noqa: E731
        call = msgspec.structs.replace(
            self._loop.describe_call("evaluate", feed), batch_size=at_once, metric=describe_function(metric)
        )
        return Evaluation(self._precision.of(metric), self._loop.engine.compute, load, call, at_once)

    def _sum_up_in_time(self, evaluation: Evaluation) -> None:
        """Adds up the metric before its deadline. One that is given up is no evaluation of the run."""

        def sums(stopping: AbstractContextManager[Any]) -> torch.Tensor:
            with evaluating(self.model), torch.no_grad(), around(self.model, stopping):
                return evaluation.over(range(evaluation.length))

        evaluation.sums = self._calls.run("the evaluation", sums)

    def log(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Tell numbers of the script's own, as in `trainer.log(lr=0.1)` or `trainer.log({"train/lr": 0.1})`: they are
        in the run's events, its display, its summary, and `--until` may ask for them.

        Every replica may call it: what the one in charge says is told, once. In plain `python` nothing is written.
        """
        if not isinstance(values, Mapping | None):
            raise DataError("what is logged", type(values).__name__, "give numbers by name, as in log(lr=0.1)")
        self._loop.log(check_values({**(values or {}), **named}))

    def report(self, value: Any, *, name: str | None = None) -> None:
        """Tell how good the model is by now, as `log` does, under the name of the metric that `paceline tune` looks for
        unless another is given; without a tuner that is `reported`.

        A tuner that has seen enough of this trial asks it to end, and it does so after its next step: all replicas
        alike, with nothing else saved. Every named evaluation and logged number of that name is a report as well.
        """
        trial = find_trial()
        given = name if name is not None else trial.metric if trial is not None else "reported"
        self.log({check_name("name of what is reported", given): value})

    def predict(self, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """`model(*args, **kwargs)` as the model stands now, in eval mode and without gradients; or another `method` of
        it, as in `trainer.predict(tokens, method="generate")`. Afterwards each module is in its own mode again.

        This process computes it by itself on the whole model, under every strategy: any one may call it, all may, each
        with what it likes. What the model returns comes back as it is.
        """
        if not callable(getattr(self.model, method, None)):
            raise ModelError("method", method, f"a {type(self.model).__name__} has none of this name, give one it has")
        answer = partial(self._loop.predict_alone, method, args, kwargs)
        return self._calls.run("the model", lambda stopping: answer(stopping))

    def predictor(self) -> Callable[..., Any]:
        """`predict` by all devices of a cut model together, for one that answers too slowly on one: `predictor(*args)`
        is `model(*args)` in eval mode, without gradients. All devices of a replica ask the same together, and each gets
        the whole answer.

        Outside a run, `pl.load` cuts a saved model over devices that one plain process asks.
        """
        if self._place.strategy.on_servers:
            raise StrategyError("predictor", "with servers", "call trainer.predict, or save the model and use pl.load")

        def predictor(*args: Any, **kwargs: Any) -> Any:
            refuse_deadline("a request to all devices of a replica", "use trainer.predict, or pl.load outside of a run")
            with evaluating(self.model), torch.no_grad():
                return self._loop.predict(args, kwargs)

        return predictor

    # ── saving and resuming ──────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str], *, keep: int = 2) -> None:
        """Save the model, and everything needed to go on, as a checkpoint at `path`; the one before is kept.

        `path` itself is a safetensors file with the model's own state_dict.
        """
        self._calls.settle()
        self._loop.save(path, keep)

    def resume(self, path: str | os.PathLike[str], *, fall_back: bool = False) -> bool:
        """Go on where the checkpoint at `path` was saved; call it before `batches`.

        Returns False, and does nothing, if there is no such file. A damaged file is refused; with `fall_back` the
        one saved before it is used.
        """
        return self._loop.resume(path, fall_back)

    def close(self) -> None:
        """Let go of shared memory and of servers. Not needed at the end of a script."""
        self._loop.close()
