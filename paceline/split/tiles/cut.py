"""One device's side of a model that is cut by image region."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from paceline.errors import ModelError, StrategyError
from paceline.exchange.mailboxes import DeviceGroup, Peers
from paceline.loss_value import LossPart, Weight
from paceline.optim.models import in_mode, left_as_it_was, own_state
from paceline.optim.postponed import Postponed
from paceline.split.cut import (
    SAME,
    WHOLE,
    Check,
    Cut,
    Example,
    Function,
    Loss,
    TensorPart,
    first_call,
    train,
)
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.halo_exchange import gathered
from paceline.split.tiles.norms import TiledBatchNorm
from paceline.split.tiles.tile import Grid, Tile
from paceline.split.tiles.tiled_forward import TiledForward
from paceline.split.values import Tiles
from paceline.torch_private import AnyBatchNorm, tree_map

MOST_POSTPONED = 2  # gradients of weights: each keeps what its layer was given, and the gradient of what it gave


class TilesCut(Cut):
    """Every device has a tile of each activation; parameters are whole, and gradients of most are summands."""

    def __init__(self, split: Tiles, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._tiled = TiledForward(Grid(split, peers))
        self._replaced: tuple[nn.Module, Callable[..., Any]] | None = None  # a model's forward
        self._norms: dict[nn.Module, TiledBatchNorm] = {}
        self._later = Postponed(MOST_POSTPONED)  # gradients of weights
        self._head: set[str] = set()
        self._buffers: set[str] = set()

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        if not self._tiled.grid.axes:
            return
        example = first_call(function, model, given)
        whole, model = model, own_state(model)
        norms = [module for module in model.modules() if isinstance(module, AnyBatchNorm)]
        self._norms = {module: TiledBatchNorm(self._tiled, module) for module in norms}
        self._replaced = model, model.forward
        model.forward = functools.partial(self._forward, model.forward)
        if whole is not model:  # compiled: the compiler would follow the tiles into the mailboxes
            model.forward = torch.compiler.disable(model.forward)  # type: ignore[no-untyped-call]
        try:
            self._look(model, example)
        except BaseException:
            self.release()
            raise
        self._tiled.head = self._tiled.dry_run.only_after_tiles()
        self._head = {name for name, parameter in model.named_parameters() if parameter in self._tiled.head}
        self._buffers = {name for name, _ in model.named_buffers()}

    def release(self) -> None:
        if self._replaced is not None:
            model, forward = self._replaced
            model.forward = forward
        for norm in self._norms.values():
            norm.undo()
        self._replaced, self._norms = None, {}

    def part_of(self, name: str) -> TensorPart:
        as_on_the_first = name in self._head or name in self._buffers
        return SAME if as_on_the_first and self.peers.rank else WHOLE

    def over_devices(self, module: nn.Module) -> bool:
        return module in self._norms and self._norms[module].sees_tiles

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        """Computes the loss, as all devices do; it counts on the first: gradients are summands."""
        self._later.forget()
        self.peers.while_waiting(self._later.do_one)
        with self.at_work(), self._later.backward():
            part = train(loss, model, batch, weight if self.speaks else weight.silenced(), check)
            self._later.do_all()
        return part

    # ── the model's forward ──────────────────────────────────────────────────────────────────────────────

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward on tiles, and returns whole tensors."""
        if not self.is_at_work:
            return forward(*args, **kwargs)
        args, kwargs = tree_map(self._entering, args), tree_map(self._entering, kwargs)
        self._tiled.side_by_side.begin()
        with self._tiled:
            found = forward(*args, **kwargs)
        self._tiled.in_head = False
        return tree_map(lambda leaf: gathered(leaf) if isinstance(leaf, Tile) else leaf, found)

    def _entering(self, leaf: Any) -> Any:
        """Returns an input with the right gradient. If anybody wants it, it is whole: on all for what the user holds
        in hand; on the first for what was computed, which adds it up with all else."""
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad or not torch.is_grad_enabled():
            return leaf
        return _Entered.apply(leaf, self.peers.everyone, leaf.is_leaf)  # type: ignore[no-untyped-call]

    def _look(self, model: nn.Module, example: Example) -> None:
        """Run it once, in training mode, and leave everything as it was."""
        tiled = self._tiled
        args, kwargs = example
        with (
            in_mode(model, training=True),
            left_as_it_was(model),
            _named(model, tiled.where),
            torch.no_grad(),
            self.at_work(),
        ):
            tiled.is_dry_run = True
            try:
                with _OwnFunctionsRefused():
                    model(*args, **kwargs)
            finally:
                tiled.is_dry_run = False
        dry_run = tiled.dry_run
        if not dry_run.cuts:
            self._refuse(model)
        if not self.peers.rank and dry_run.middle is not None:
            module, name = dry_run.middle
            warnings.warn(
                f"tiles: {module or 'the model'} gathers the image for {name}, which is exact and no faster than on "
                "one device",
                stacklevel=2,
            )

    def _refuse(self, model: nn.Module) -> None:
        """Raises the sentence for a model of which nothing could be cut."""
        split = f"{self._split.rows}x{self._split.columns}"
        if self._tiled.dry_run.why_not is not None:
            module, name, why = self._tiled.dry_run.why_not
            raise StrategyError("tiles", split, f"{name}{f' in {module}' if module else ''} cannot be cut, {why}")
        kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if not list(module.children()))
        raise ModelError(
            "model",
            type(model).__name__,
            f"it has no convolution or pooling, so no image to cut into tiles {split}, only "
            f"{', '.join(kinds) or 'functions'}: leave out --tiles",
        )


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup, on_all: bool) -> torch.Tensor:
        ctx.group, ctx.on_all = group, on_all
        return torch.ops.aten.alias(x)  # type: ignore[no-any-return]  # a view might forget how a single image lies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = ctx.group.all_reduce(dy)
        return total if ctx.on_all or ctx.group.index == 0 else torch.zeros_like(total), None, None


class _OwnFunctionsRefused:
    """Refuses a user's `autograd.Function` in this thread, inside: it is given tiles, of which its backward knows
    nothing."""

    lock, threads_inside, here = threading.Lock(), 0, threading.local()
    plain: ClassVar[list[Any]] = []  # torch's own `apply`: in a list, as an attribute it would be bound to this class

    def __enter__(self) -> None:
        kind = _OwnFunctionsRefused
        with kind.lock:
            kind.threads_inside += 1
            if kind.threads_inside == 1:
                kind.plain[:] = [torch.autograd.Function.__dict__["apply"]]  # Python's classmethod, or one of C
                torch.autograd.Function.apply = classmethod(kind.checked)  # type: ignore[method-assign, assignment]
        kind.here.inside = True

    def __exit__(self, *_: object) -> None:
        kind = _OwnFunctionsRefused
        kind.here.inside = False
        with kind.lock:
            kind.threads_inside -= 1
            if kind.threads_inside == 0:
                torch.autograd.Function.apply = kind.plain[0]  # type: ignore[method-assign]

    @staticmethod
    def checked(kind: type, *args: Any, **kwargs: Any) -> Any:
        plain = _OwnFunctionsRefused.plain[0]
        inside = getattr(_OwnFunctionsRefused.here, "inside", False)
        if inside and not kind.__module__.startswith(("paceline.", "torch.")):
            raise ModelError("model", kind.__name__, "an autograd.Function is not cut into tiles; use --replicas")
        return plain.__get__(None, kind)(*args, **kwargs)


@contextmanager
def _named(model: nn.Module, where: list[str]) -> Iterator[None]:
    """Keeps the name of the module that runs at the end of `where`."""

    def left(*_: Any) -> None:
        where.pop()

    handles = []
    for name, module in model.named_modules():
        named = f"{name} ({type(module).__name__})" if name else ""
        handles.append(module.register_forward_pre_hook(lambda *_, named=named: where.append(named)))
        handles.append(module.register_forward_hook(left))
    try:
        yield
    finally:
        where.clear()
        for handle in handles:
            handle.remove()
