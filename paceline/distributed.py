"""`distribute`: an existing loop, two lines changed, DDP's semantics.

    model, optimizer = pl.distribute(model, optimizer)

After `loss.backward()` every `p.grad` is the mean over the replicas. Both objects stay what they were: hooks on the
parameters collect gradients in shared memory, where each replica's `p.grad` then lies, and owners average them there.

Parameters and optimizer are each replica's own. All start alike, get the same gradients and do the same with them, so
they stay alike, and whatever else the script does with them means what it means in one process: a weight clamped, a
layer made anew, an average kept, a state loaded, an optimizer nobody here has heard of. Were the parameters shared, as
they are under `Trainer`, every replica would write all of that into the same memory once more.

The loop and its data are the user's: each replica must draw its own samples, as with DDP (`DistributedSampler` with
`pl.place()`'s rank and world). A replica that dies takes its samples with it; the others go on with the mean over
those who are left.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import LaunchError, ModelError, ReplicaDied, StrategyError
from paceline.exchange.host_sums import HostSums
from paceline.exchange.links import Links
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.wire_names import matrix_rank
from paceline.exchange.words import Kind, Phase, Word
from paceline.machine import check_shared_words
from paceline.mirrored.opening import meet
from paceline.mirrored.reducer import MeanReducer
from paceline.mirrored.shared_model import SharedModel
from paceline.optim.models import buffers_of, grouped_parameters
from paceline.run_place import Place, find_place
from paceline.slow_replicas import slow_words
from paceline.torch_private import after_backward, buffer_tables

COMPARE_EVERY = 16  # exchanges; looking takes longer than a small exchange
DIFFERENCE = 1e-3  # of what is looked at: replicas may round differently, but not that much

Model = TypeVar("Model", bound=nn.Module)
SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)


def place() -> Place:
    """Which replica this process is: `pl.place().rank` of `pl.place().world`."""
    return find_place()


def distribute(model: Model, optimizer: SomeOptimizer) -> tuple[Model, SomeOptimizer]:
    """Make a loop that trains `model` with `optimizer` one of several replicas; both are returned as they are.

    `loss.backward()` leaves the mean over the replicas in every `p.grad`, and makes the model's buffers those of the
    first replica. `model.no_sync()` is a context in which backward does neither, for gradient accumulation.

    Parameters and the optimizer's state are each replica's own, as with DDP: what one changes outside of backward,
    all have to change alike, and when some have not they are told so. A copy of the model is an ordinary model that
    exchanges nothing.
    """
    where = find_place()
    if where.recording is not None:
        raise LaunchError("paceline verify compares the steps of a pl.Trainer, and this script uses pl.distribute")
    if where.servers is not None:
        raise StrategyError(
            "servers", len(where.servers.addresses), "pl.distribute has mirrored replicas only; use pl.Trainer"
        )
    if (split := where.strategy.split) is not None:
        raise StrategyError("split", split.words, "a loop of one's own is not cut; use pl.Trainer, or give --replicas")
    strategy = where.strategy
    if not strategy.on_servers and strategy.steps_locally:
        field, value = ("gossip", "set") if strategy.gossip else ("every", strategy.every)
        raise StrategyError(field, value, "a loop of one's own exchanges gradients at each backward; use pl.Trainer")
    if not strategy.on_servers and strategy.overlap:
        raise StrategyError("overlap", "set", "a loop of one's own waits for its updates itself; use pl.Trainer")
    if matrix_rank(strategy.wire) is not None:
        raise StrategyError("wire", strategy.wire, "a loop of one's own keeps no bases; use pl.Trainer, or topk:0.01")
    if where.slow:
        raise StrategyError("slow", slow_words(where.slow), "a loop of one's own computes by itself; use pl.Trainer")
    if where.world == 1 and where.board is None:
        model.no_sync = contextlib.nullcontext  # type: ignore[assignment]
        return model, optimizer
    check_shared_words("pl.distribute has no replicas")
    grouped_parameters(model, optimizer)  # which refuses an optimizer of other parameters
    no_sync = getattr(model, "no_sync", None)
    if not isinstance(no_sync, _NoSync):  # or it has another optimizer already
        no_sync = model.no_sync = _NoSync(_GradientMean(model, optimizer, *meet(model, where)))  # type: ignore[assignment]
    no_sync.mean.serve(optimizer)
    return model, optimizer


class _NoSync:
    """The `no_sync` of a distributed model; in a copy of it, or in a file, one that does nothing."""

    def __init__(self, mean: _GradientMean) -> None:
        self.mean = mean

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self.mean.paused()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (contextlib.nullcontext,)


class _SharedGradients(SharedModel):
    """The replicas compare their parameters in an arena, and keep their own."""

    def point_to_arena(self) -> None:
        """Leave the parameters where they are."""


class _GradientMean:
    """The hooks behind one distributed model."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, where: Place, together: Together, links: Links | None
    ) -> None:
        if where.restarted:
            raise ReplicaDied(
                f"replica {where.row} was started again, but a loop under pl.distribute cannot be joined in the "
                "middle: use pl.Trainer, or --on-failure continue"
            )
        self._model = model
        board = self._board = together.board
        self._replica = where.row
        self._together = together
        self._links = links
        self._sums = None
        if links is not None:
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            self._sums = HostSums.by_value(links, where.strategy.wire, device)
        board.announce(self._replica)
        given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        averaged = [parameter for parameter in model.parameters() if parameter.requires_grad or parameter in given]
        self._asks = torch.optim.SGD(averaged)  # for a place for their gradients, and for no state
        self._share()
        self._known = set(self._parameters)
        self._exchanging = True
        self._queued = False
        self._exchanges = 0
        self._step_ended_ns = self._exchange_began_ns = self._exchange_ended_ns = time.monotonic_ns()
        self._held: list[dict[str, torch.Tensor | None]] = []  # by module: its buffers
        self._seen: list[torch.Tensor | None] = []  # all of them, as of the last thorough look
        self._look_at_buffers(thoroughly=True)
        for index, parameter in enumerate(self._parameters):
            frozen = not parameter.requires_grad  # it may not stay so, and a hook can be given to no frozen one
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(functools.partial(self._landed, index))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not frozen)

    def _share(self) -> None:
        """Come to have room in common for gradients and for buffers as the model has them now."""
        self._shared = _SharedGradients(self._model, self._asks, self._together)
        self._shared.share()
        if self._links is not None:
            self._shared.compare_hosts(self._links.sum, self._links.hosts)
        arena = self._arena = self._shared.arena
        self._reducer = MeanReducer(self._together, arena, self._sums, self._links.hosts if self._links else 1)
        self._parameters = self._shared.trained
        self._views = [arena.gradient(self._replica, arena.layout.slots[i]) for i in range(len(self._parameters))]
        self._touched: list[bool] = []

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around a backward that exchanges nothing."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def _landed(self, index: int, parameter: torch.Tensor) -> None:
        gradient, view = parameter.grad, self._views[index]
        assert gradient is not None
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient) if gradient.layout is torch.strided else view.zero_().add_(gradient)
            parameter.grad = view
        if self._exchanging and not self._queued:
            self._queued = True
            after_backward(self._exchange)

    def _exchange(self) -> None:
        """Backward is over: leave the mean in every `p.grad`."""
        self._queued = False
        self._exchange_began_ns = time.monotonic_ns()
        compare = self._exchanges % COMPARE_EVERY == 1
        self._look_at_buffers(thoroughly=compare)
        self._exchanges += 1
        if compare:
            self._board.set_float(self._replica, Word.PARAMETERS, self._sample_of_parameters())
        touched = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view and gradient.data_ptr() != view.data_ptr():  # the script has put it there
                view.copy_(gradient)
            touched.append(gradient is not None)
        if touched != self._touched:
            self._touched = touched
            self._arena.touched[self._replica, : len(touched)] = torch.tensor(touched, dtype=torch.uint8)

        def one_try(members: Members) -> Members:
            self._board.work_on(members, Kind.STEP, Phase.COMPUTING)
            if members.first == self._replica:
                self._shared.publish_buffers()
            self._together.arrive(members, Phase.AWAITING_GRADIENTS)
            return members

        members = self._together.attempt(one_try)
        if compare:
            self._compare_parameters(members)
        links = self._links
        self._shared.take_buffers(links.sum if links else None, first=links is None or links.host == 0)
        used = self._used(members)
        self._reducer.reduce(members)
        for parameter, view, is_used in zip(self._parameters, self._views, used, strict=False):
            if is_used and parameter.grad is not view:
                parameter.grad = view
        if self._sums is not None:
            self._sums.commit()
        self._board.enter(self._replica, Phase.BETWEEN)
        self._exchange_ended_ns = time.monotonic_ns()

    def _used(self, members: Members) -> list[bool]:
        """By parameter, whether anybody has a gradient for it."""
        if self._links is None and all(self._touched):
            return self._touched
        used = self._arena.touched[list(members.ranks)].amax(0)
        if self._links is not None:
            used = self._links.sum(used.double())
        return (used > 0).tolist()

    def _sample_of_parameters(self) -> float:
        """What the elements in the middle of every parameter come to."""
        middles = [p.detach()[tuple(extent // 2 for extent in p.shape)] for p in self._parameters if p.numel()]
        return sum(float(middle.abs()) for middle in middles)

    def _compare_parameters(self, members: Members) -> None:
        mine = self._board.get_float(self._replica, Word.PARAMETERS)
        for other in members.ranks:
            theirs = self._board.get_float(other, Word.PARAMETERS)
            if not math.isclose(mine, theirs, rel_tol=DIFFERENCE) and not math.isnan(mine + theirs):
                raise ModelError(
                    "model",
                    type(self._model).__name__,
                    f"the parameters of replicas {self._replica} and {other} have become different; change them in "
                    "every replica alike, or in one and pl.broadcast them",
                )

    def _look_at_buffers(self, *, thoroughly: bool) -> None:
        """A script may give a module another tensor as its buffer, and pruning gives it a new one."""
        now = [buffer for held in self._held for buffer in held.values()]
        same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        if same and not thoroughly:
            return
        buffers = buffers_of(self._model)
        if [(b.shape, b.dtype) for b in buffers] != [(b.shape, b.dtype) for b in self._shared.buffers]:
            self._share()
        self._shared.buffers = buffers
        self._held = buffer_tables(self._model)
        self._seen = [buffer for held in self._held for buffer in held.values()]

    # ── the optimizer ────────────────────────────────────────────────────────────────────────────────────

    def serve(self, optimizer: Optimizer) -> None:
        """Count the steps of `optimizer`, and see that it is given no gradient but means."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._known:
                    raise ModelError(
                        "optimizer",
                        type(optimizer).__name__,
                        f"a parameter of shape {tuple(parameter.shape)} was frozen and in no optimizer, or not in the "
                        "model, when pl.distribute was called, so its gradient is this replica's alone; call "
                        "pl.distribute after the model and the optimizer have got it",
                    )
        self._update_began_ns = time.monotonic_ns()
        self._board.enter(self._replica, Phase.UPDATING)

    def _after_step(self, *_: Any) -> None:
        self._board.set(self._replica, Word.COMPUTE_NS, self._exchange_began_ns - self._step_ended_ns)
        self._board.set(self._replica, Word.WAIT_NS, self._exchange_ended_ns - self._exchange_began_ns)
        self._step_ended_ns = time.monotonic_ns()
        self._board.set(self._replica, Word.UPDATE_NS, self._step_ended_ns - self._update_began_ns)
        self._board.set(self._replica, Word.STEP, self._board.get(self._replica, Word.STEP) + 1)
        self._board.enter(self._replica, Phase.BETWEEN)
