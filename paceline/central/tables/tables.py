"""Tables: embeddings of which a step touches a few rows, kept and updated by row.

A table is an `nn.Embedding(sparse=True)`. Its rows are dealt out to the servers in turn (row r is on server r mod n),
so that neighbouring rows, which are often used together, are spread. Only rows travel: a replica pulls those its batch
needs, and pushes gradients of just those.

The optimizer is *lazy*: a step changes the rows it has gradients for, and the state of those rows, and nothing else.
For plain SGD and Adagrad that is what torch does too. Where torch's dense optimizers would also move rows without a
gradient, a lazy one does not:

    SGD with momentum   a row's momentum decays only in steps that touch the row
    Adam, AdamW         as torch.optim.SparseAdam: moments decay only in steps that touch the row, bias correction
                        counts the steps of the whole table
    weight decay        applies to the rows that are touched

Memory that no row has touched is not there: a table's state costs as much as the rows that were ever used.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.central.shards import TableSpec
from paceline.errors import ArenaError, ModelError, PacelineError
from paceline.machine import free_memory
from paceline.memory import segment
from paceline.memory.arena import Arena

Options = Mapping[str, Any]


@dataclass
class Rows:
    """Some rows of a table: which (as numbered on their server), and a value for each."""

    ids: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.values


@dataclass
class TableCopy:
    """A table as it was after some step."""

    weight: torch.Tensor
    state: dict[str, torch.Tensor]
    steps: int


class Table:
    """The rows of a table that lie on one server."""

    def __init__(self, spec: TableSpec, optimizer: str, options: Options, server: int, servers: int) -> None:
        """`options`: of the optimizer's group that it is in."""
        if optimizer not in LAZY:
            raise ModelError("optimizer", optimizer, f"tables are updated by {', '.join(LAZY)}; use one of them")
        for option in NOT_LAZY.get(optimizer, ()):
            if options.get(option):
                expected = f"rows of {spec.name} are updated without it; leave it out, or give it another group"
                raise ModelError("optimizer", f"{optimizer}({option}={options[option]})", expected)
        self.spec = spec
        self._optimizer = optimizer
        self._update = LAZY[optimizer]
        self.rows = len(range(server, spec.rows, servers))
        size = max(1, self.rows * spec.width) * 4
        if size > free_memory():
            mib = [f"{bytes_ / 2**20:,.0f} MiB" for bytes_ in (size, free_memory())]
            raise ArenaError(f"the rows of {spec.name} on this server need {mib[0]} and {mib[1]} is free")
        self.arena = _zeros(size)
        self.weight = table_view(self.arena, self.rows, spec.width)
        self.state: dict[str, torch.Tensor] = {}
        self.steps = 0
        self.last = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, spec.width))  # gradient of the last step
        if spec.initialize:
            seed = zlib.crc32(f"{spec.name}/{server}".encode())
            self.weight.normal_(generator=torch.Generator().manual_seed(seed))

    def check_rows(self, ids: torch.Tensor) -> None:
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.rows):
            raise PacelineError(f"a row of {self.spec.name} does not exist: this server has {self.rows}")

    def update(self, given: Sequence[tuple[Rows, float]], options: Options, scale: float) -> None:
        """Make one step, from the replicas' gradients and what each counts."""
        rows = self.summed(given)
        self.last = Rows(rows.ids, rows.values.clone()) if scale != 1.0 else rows
        self.steps += 1
        if rows.ids.numel():
            gradient = rows.values.mul_(scale) if scale != 1.0 else rows.values
            if options.get("maximize"):
                gradient = gradient.neg()
            self._update(self, rows.ids, gradient, options)

    def summed(self, given: Sequence[tuple[Rows, float]]) -> Rows:
        """Return every row once, with the weighted sum of its gradients."""
        ids = torch.cat([rows.ids for rows, _ in given])
        unique, places = torch.unique(ids, return_inverse=True)
        total = torch.zeros(len(unique), self.spec.width)
        start = 0
        for rows, weight in given:
            stop = start + len(rows.ids)
            total.index_add_(0, places[start:stop], rows.values, alpha=weight)
            start = stop
        return Rows(unique, total)

    def kept(self, key: str, fill: float = 0.0) -> torch.Tensor:
        """Return a value of state for every row. Zeros take no memory before they are written."""
        if key not in self.state:
            self.state[key] = table_view(_zeros(self.arena.size), self.rows, self.spec.width)
            if fill:
                self.state[key].fill_(fill)
        return self.state[key]

    def copy(self) -> TableCopy:
        return TableCopy(self.weight.clone(), {key: value.clone() for key, value in self.state.items()}, self.steps)

    def put(self, key: str, start: int, values: torch.Tensor) -> None:
        """Write values for rows from `start` on: of the weight (no key), or of the state."""
        target = self.weight if not key else self.kept(key)
        target[start : start + len(values)] = values


def _zeros(size: int) -> Arena:
    """Return memory that is only there where it has been written; `torch.zeros` writes all of it."""
    return Arena.of(segment.make("table", size))


def table_view(arena: Arena, rows: int, width: int) -> torch.Tensor:
    return arena.view(0, torch.float32, [rows, width])


# ── lazy optimizers ──────────────────────────────────────────────────────────────────────────────────────────


def _decayed(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> torch.Tensor:
    if options.get("weight_decay"):
        gradient = gradient.add(table.weight.index_select(0, ids), alpha=options["weight_decay"])
    return gradient


def _move(table: Table, ids: torch.Tensor, step: torch.Tensor, rate: float) -> None:
    # Every row is there once: reading, adding and writing back is faster than index_add_.
    table.weight.index_copy_(0, ids, table.weight.index_select(0, ids).add_(step, alpha=-rate))


def _sgd(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
    gradient = _decayed(table, ids, gradient, options)
    if momentum := options.get("momentum"):
        kept = table.kept("momentum_buffer")
        moved = kept.index_select(0, ids).mul_(momentum).add_(gradient, alpha=1 - options.get("dampening", 0))
        kept.index_copy_(0, ids, moved)
        gradient = gradient.add(moved, alpha=momentum) if options.get("nesterov") else moved
    _move(table, ids, gradient, options["lr"])


def _adagrad(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
    gradient = _decayed(table, ids, gradient, options)
    rate = options["lr"] / (1 + (table.steps - 1) * options.get("lr_decay", 0))
    kept = table.kept("sum", options.get("initial_accumulator_value", 0.0))
    total = kept.index_select(0, ids).addcmul_(gradient, gradient)
    kept.index_copy_(0, ids, total)
    _move(table, ids, gradient / total.sqrt_().add_(options.get("eps", 1e-10)), rate)


def _adam(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
    _moments(table, ids, _decayed(table, ids, gradient, options), options)


def _adamw(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
    if decay := options.get("weight_decay"):
        shrunk = table.weight.index_select(0, ids).mul_(1 - options["lr"] * decay)
        table.weight.index_copy_(0, ids, shrunk)
    _moments(table, ids, gradient, options)


def _moments(table: Table, ids: torch.Tensor, gradient: torch.Tensor, options: Options) -> None:
    first, second = options["betas"]
    kept_mean, kept_square = table.kept("exp_avg"), table.kept("exp_avg_sq")
    mean = kept_mean.index_select(0, ids).lerp_(gradient, 1 - first)
    square = kept_square.index_select(0, ids).mul_(second).addcmul_(gradient, gradient, value=1 - second)
    kept_mean.index_copy_(0, ids, mean)
    kept_square.index_copy_(0, ids, square)
    correction = math.sqrt(1 - second**table.steps) / (1 - first**table.steps)
    step = mean / square.sqrt_().add_(options.get("eps", 1e-8))
    _move(table, ids, step, options["lr"] * correction)


LAZY: Mapping[str, Callable[[Table, torch.Tensor, torch.Tensor, Options], None]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _adam,
    "AdamW": _adamw,
}


# What these can do with whole parameters, and not with rows.
NOT_LAZY = {"SGD": ("dampening",), "Adam": ("amsgrad", "decoupled_weight_decay"), "AdamW": ("amsgrad",)}


# ── which rows are where ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Dealt:
    """Rows of a table, told apart by the server they are on."""

    ids: list[torch.Tensor] = field(default_factory=list)  # as numbered on each server
    places: list[torch.Tensor] = field(default_factory=list)  # where each of them was among the rows

    @classmethod
    def out(cls, rows: torch.Tensor, servers: int) -> Dealt:
        """
        >>> Dealt.out(torch.tensor([0, 3, 4]), 2).ids
        [tensor([0, 2]), tensor([1])]
        """
        if servers == 1:
            return cls([rows], [torch.arange(len(rows))])
        places = [torch.nonzero(rows % servers == server).view(-1) for server in range(servers)]
        return cls([rows[place] // servers for place in places], places)
