"""A forward over tiles: every torch function that the model calls comes here.

    on tiles, and known        done on this device's part (`OPS`)
    on tiles, and not known    the tiles are gathered, and it is done on the whole, on every device alike
    on a whole image           a convolution or a pooling cuts it (`CUTS`); anything else is done as ever

Before training there is one dry run, which shows whether anything is cut at all, and which parameters are used only
after all that is cut. Their gradients are the first device's alone, so the others need not bring theirs.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.split.tiles import norms, pointwise, reductions, resize, spatial
from paceline.split.tiles.halo_exchange import gathered
from paceline.split.tiles.side_by_side import HowImagesLie
from paceline.split.tiles.tile import Func, Grid, Tile, find
from paceline.torch_private import PlainTensors, tree_map

CUTS: dict[str, Func] = {
    **{f"conv{n}d": spatial.convolve for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": spatial.transposed for n in (1, 2, 3)},
    **{f"max_pool{n}d": spatial.max_pool for n in (1, 2, 3)},
    **{f"avg_pool{n}d": spatial.average_pool for n in (1, 2, 3)},
}
OPS: dict[str, Func] = {
    **CUTS,
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "local_response_norm"), pointwise.over_channels),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "glu"), pointwise.along),
    **dict.fromkeys(("cat", "concat", "concatenate"), pointwise.concatenate),
    **dict.fromkeys(("chunk", "split"), pointwise.split),
    **dict.fromkeys(("narrow", "index_select"), pointwise.narrow),
    **dict.fromkeys(("view", "reshape"), pointwise.reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), pointwise.transpose),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"), pointwise.new),
    **dict.fromkeys(("sum", "mean"), reductions.add_up),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin", "logsumexp"), reductions.highest),
    **{f"adaptive_avg_pool{n}d": reductions.pool_to_one for n in (1, 2, 3)},
    "pad": spatial.pad,
    "prelu": pointwise.prelu,
    "expand_as": pointwise.expand_as,
    "dropout": pointwise.dropout,
    "batch_norm": pointwise.batch_norm,
    "layer_norm": pointwise.layer_norm,
    "linear": pointwise.linear,
    "permute": pointwise.permute,
    "__getitem__": pointwise.item,
    "group_norm": norms.group_norm,
    "instance_norm": norms.instance_norm,
    "interpolate": resize.interpolate,
    "pixel_shuffle": resize.pixel_shuffle,
}
# What a tile knows of the whole without having it.
_METHODS = """
    size dim ndimension numel nelement is_floating_point is_complex is_signed is_contiguous element_size get_device
    __len__ __hash__ stride is_same_size
"""
_ATTRIBUTES = "shape ndim dtype device layout is_cuda is_cpu is_sparse is_quantized is_meta is_nested is_mps is_xpu"
KNOWN = frozenset(_METHODS.split())
KNOWN_ATTRIBUTES = frozenset(_ATTRIBUTES.split())
OF_LOCAL = frozenset(("requires_grad", "grad_fn", "is_leaf"))
REFUSED = frozenset(
    ("register_hook", "retain_grad", "backward", "requires_grad_", "register_post_accumulate_grad_hook")
)


class DryRun:
    """What the dry run has shown."""

    def __init__(self) -> None:
        self.cuts = False
        self.why_not: tuple[str, str, str] | None = None  # the first op that could not be cut: module, op, reason
        self.middle: tuple[str, str] | None = None  # an op for which large images are gathered, and then cut again
        self._gathered: tuple[str, str] | None = None
        self._largest = 0
        self._now = self._last_on_tiles = 0
        self._first_use: dict[nn.Parameter, int] = {}

    def step(self, args: Any, kwargs: dict[str, Any], *, on_tiles: bool) -> None:
        """Notes an op, and the parameters it uses."""
        self._now += 1
        for parameter in _parameters((*args, *kwargs.values())):
            self._first_use.setdefault(parameter, self._now)
        if on_tiles:
            self.cuts = True
            self._last_on_tiles = self._now

    def gathers(self, module: str, name: str) -> None:
        """Notes that an image was put together for this op."""
        self._gathered = module, name

    def cuts_whole(self, values: int) -> None:
        """Notes that a tensor of so many values, which is not a tile, is cut."""
        if self._gathered is not None and 4 * values >= self._largest:
            self.middle = self._gathered
        self._largest = max(values, self._largest)

    def only_after_tiles(self) -> set[nn.Parameter]:
        """Returns the parameters that are used only after all that is cut."""
        return {parameter for parameter, at in self._first_use.items() if at > self._last_on_tiles}


class TiledForward(TorchFunctionMode):
    """Stands around each forward of the model, as a context manager, and runs what the model calls on tiles."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.dry_run = DryRun()
        self.is_dry_run = False
        self.side_by_side = HowImagesLie()
        self.head: set[nn.Parameter] = set()  # used only after all that is cut
        self.in_head = False
        self.where: list[str] = []  # in the dry run: the module that is running, and those around it

    def __torch_function__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what `func` gives, done on tiles if it can be."""
        name: str = getattr(func, "__name__", "")
        tile = find(args) if not kwargs else find((*args, *kwargs.values()))
        if tile is None:
            cut = CUTS.get(name)
            if cut is None:
                self._note(args, kwargs, on_tiles=False)
                return func(*args, **kwargs)
        elif name in KNOWN or name == "__get__":
            return self._known(func, tile, args, kwargs)
        else:
            cut = OPS.get(name) or (pointwise.pointwise if pointwise.is_pointwise(name) else None)
        if cut is not None:
            with PlainTensors():
                found = cut(self, func, *args, **kwargs)
            if found is not NotImplemented:
                self._note(args, kwargs, on_tiles=tile is not None or isinstance(found, Tile))
                return found
        self._note(args, kwargs, on_tiles=False)
        if tile is None:
            return func(*args, **kwargs)
        return self._on_whole(func, name, args, kwargs)

    def note(self, module: nn.Module, *, on_tiles: bool) -> None:
        """Notes the use of a module that knows itself what to do."""
        self._note(module.parameters(), {}, on_tiles=on_tiles)

    def _known(self, func: Func, tile: Tile, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what a tile knows of the whole without having it: its size, its type."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", None)
        if func.__name__ == "__get__" and attribute not in KNOWN_ATTRIBUTES:
            if attribute in OF_LOCAL:
                return getattr(tile.local, attribute)
            return self._on_whole(func, str(attribute), args, kwargs)
        with PlainTensors():
            return func(*args, **kwargs)

    def _note(self, args: Any, kwargs: dict[str, Any], *, on_tiles: bool) -> None:
        if self.is_dry_run:
            self.dry_run.step(args, kwargs, on_tiles=on_tiles)
        elif self.head and torch.is_grad_enabled():
            uses_head = any(p in self.head for p in _parameters((*args, *kwargs.values())))
            if on_tiles and (self.in_head or uses_head):
                self.changed_its_way(None)
            self.in_head |= uses_head

    # ── what is not done on tiles ────────────────────────────────────────────────────────────────────────

    def _on_whole(self, func: Func, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gathers the tiles, and does it on the whole."""
        first = args[0] if args else None
        changes = isinstance(first, Tile) and pointwise.in_place(func, kwargs)
        if changes or name in REFUSED or isinstance(kwargs.get("out"), Tile):
            why = "it changes a part of an image in place" if changes else "it needs the whole image itself"
            raise ModelError(
                "tiles", f"{name}{self._at()}", f"{why}, which cannot be cut: write it without, or leave out --tiles"
            )
        gather = lambda value: self.whole(value, func) if isinstance(value, Tile) else value  # noqa: E731
        args, kwargs = tree_map(gather, args), tree_map(gather, kwargs)
        return func(*args, **kwargs)

    def whole(self, tile: Tile, func: Func) -> torch.Tensor:
        """Returns all of a tile's tensor, for `func`."""
        if self.is_dry_run:
            self.dry_run.gathers(self.where[-1] if self.where else "", func.__name__)
        return gathered(tile)

    def cannot_cut(self, func: Func, why: str) -> None:
        """Notes in the dry run why an op could not be cut."""
        if self.is_dry_run and self.dry_run.why_not is None:
            self.dry_run.why_not = self.where[-1] if self.where else "", func.__name__, why

    def stay_as_they_lie(self) -> None:
        """Notes in the dry run that images must not be laid out anew."""
        if self.is_dry_run:
            self.side_by_side.allowed = False

    def changed_its_way(self, module: nn.Module | None) -> NoReturn:
        """Refuses a forward that goes another way than in the first batch."""
        raise ModelError(
            "model",
            type(module).__name__ if module is not None else "forward",
            "it was called on tiles of images in the first batch and is not now, or the other way round: "
            "give images of one size, or leave out --tiles",
        )

    def _at(self) -> str:
        return f" in {self.where[-1]}" if self.where and self.where[-1] else ""


def _parameters(values: Any) -> list[nn.Parameter]:
    found = []
    for value in values:
        if isinstance(value, nn.Parameter):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _parameters(value)
    return found
