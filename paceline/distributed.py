"""`distribute`: an existing loop, two lines changed, DDP's semantics.

    model, optimizer = pl.distribute(model, optimizer)

After `loss.backward()` every `p.grad` is the mean over the replicas, and `optimizer.step()` applies it. Both objects
stay what they were: hooks on the parameters collect gradients in shared memory, where each replica's `p.grad` then
lies; and the optimizer's `step` updates just the shard this replica owns of the one copy of the parameters.

The loop and its data are the user's: each replica must draw its own samples, as with DDP (`DistributedSampler` with
`pl.place()`'s rank and world). A replica that dies takes its samples with it; the others go on with the mean over
those who are left.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import LaunchError, ReplicaDied, StrategyError
from paceline.exchange.board import Board, HostWord, Kind, Members, Phase, Word
from paceline.exchange.links import Links
from paceline.exchange.together import Together
from paceline.machine import check_shared_words
from paceline.mirrored.opening import meet
from paceline.mirrored.owner import Owner
from paceline.mirrored.reducer import MeanReducer
from paceline.mirrored.shared_model import SharedModel
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.run_place import Place, find_place
from paceline.torch_private import after_backward, mark_stepped

Model = TypeVar("Model", bound=nn.Module)
SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)


def place() -> Place:
    """Which replica this process is: `pl.place().rank` of `pl.place().world`."""
    return find_place()


def distribute(model: Model, optimizer: SomeOptimizer) -> tuple[Model, SomeOptimizer]:
    """Make a loop that trains `model` with `optimizer` one of several replicas.

    In one plain process both come back as they are. `model.no_sync()` is a context in which backward does not
    exchange, for gradient accumulation.
    """
    where = find_place()
    if where.recording is not None:
        raise LaunchError("paceline verify compares the steps of a pl.Trainer, and this script uses pl.distribute")
    if where.servers is not None:
        raise StrategyError(
            "servers", len(where.servers.addresses), "pl.distribute has mirrored replicas only; use pl.Trainer"
        )
    if (split := getattr(where.strategy, "split", None)) is not None:
        raise StrategyError("split", split.words, "a loop of one's own is not cut; use pl.Trainer, or give --replicas")
    if where.world == 1 and where.board is None:
        model.no_sync = _nothing  # type: ignore[assignment]
        return model, optimizer
    check_shared_words("pl.distribute has no replicas")
    _Distributed(model, optimizer, *meet(model, where))
    return model, optimizer


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Distributed:
    """The hooks behind one distributed loop."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, where: Place, board: Board, links: Links | None) -> None:
        if where.restarted:
            raise ReplicaDied(
                f"replica {where.row} was started again, but a loop under pl.distribute cannot be joined in the "
                "middle: use pl.Trainer, or --on-failure continue"
            )
        self._board = board
        self._replica = where.row
        self._together = Together(board, where.row, where.strategy.timeout_s)
        self._links = links
        self._users = optimizer
        board.announce(self._replica)
        self._shared = SharedModel(model, optimizer, self._together, several_hosts=False)
        self._shared.share()
        if links is not None:
            self._shared.compare_hosts(links.sum, links.hosts)
        arena = self._arena = self._shared.arena
        self._optimizer = ShardOptimizer(optimizer, arena, self._shared.states)
        self._owner = Owner(self._together, arena, self._optimizer)
        self._reducer = MeanReducer(self._together, arena, links)
        if self._shared.users_state:
            self._fill_state(self._shared.users_state)
        self._parameters = self._shared.trained
        slots = arena.layout.slots
        self._views = [arena.gradient(self._replica, slots[i]) for i in range(len(self._parameters))]
        self._exchanging = True
        self._queued = False
        self._touched: list[bool] = []
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
        model.no_sync = self._no_sync  # type: ignore[assignment]
        self._take_over_optimizer()

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        view = self._views[index]

        def landed(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient) if gradient.layout is torch.strided else view.zero_().add_(gradient)
                parameter.grad = view
            if self._exchanging and not self._queued:
                self._queued = True
                after_backward(self._exchange)

        return landed

    def _exchange(self) -> None:
        """Backward is over: leave the mean in every `p.grad`."""
        self._queued = False
        touched = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view and gradient.data_ptr() != view.data_ptr():  # frozen before, and has no hook
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
        links = self._links
        self._shared.take_buffers(links.sum if links else None, first=links is None or links.host == 0)
        used = self._arena.touched[list(members.ranks)].amax(0)
        if self._links is not None:
            used = self._links.sum(used.double())
        self._reducer.reduce(members)
        for parameter, view, is_used in zip(self._parameters, self._views, used.tolist(), strict=False):
            if is_used and parameter.grad is not view:
                parameter.grad = view
        if self._links is not None:
            self._links.commit()
        self._board.enter(self._replica, Phase.BETWEEN)

    # ── the optimizer ────────────────────────────────────────────────────────────────────────────────────

    def _take_over_optimizer(self) -> None:
        """Replace the optimizer's `step`, and keep its state_dict whole."""
        distributed = self

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            mark_stepped(optimizer)
            distributed._step()
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._users.step = types.MethodType(step, self._users)  # type: ignore[method-assign]
        self._users.register_state_dict_pre_hook(lambda optimizer: self._export_state())
        self._users.register_load_state_dict_post_hook(lambda optimizer: self._import_state())

    def _step(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)

        # Nobody may still be reading the parameters, in its own code between backward and step.
        members = self._together.meet(Kind.UPDATE, Phase.AWAITING_UPDATES)
        self._owner.divide(members.ranks)
        self._board.enter(self._replica, Phase.UPDATING)
        self._owner.begin([int(p.grad is not None) for p in self._parameters])
        self._owner.update(members, 1.0, source=self._replica)
        step = self._board.get(self._replica, Word.STEP) + 1
        self._board.set(self._replica, Word.STEP, step)
        self._board.host_set(HostWord.CLOSED, members.op)
        self._board.enter(self._replica, Phase.BETWEEN)

    def _export_state(self) -> None:
        for number, state in self._optimizer.give_state().items():
            self._users.state[self._shared.parameters[number]] = state

    def _import_state(self) -> None:
        self._fill_state(
            {
                number: dict(self._users.state[parameter])
                for number, parameter in enumerate(self._shared.parameters)
                if self._users.state.get(parameter)
            }
        )

    def _fill_state(self, states: dict[int, dict[str, Any]]) -> None:
        """Every replica has the same whole state; the chief puts it into the arena."""
        self._together.once(lambda: self._optimizer.take_state(states))
        self._optimizer.forget()
