"""A strategy is a value: where parameters live, when their owners close a step, how bytes travel.

`Mirrored`: parameters live with the replicas, a shard each; a step closes when all have reported.
`Centralized`: they live on servers; a `Rule` says when a step closes.

A strategy answers for itself: whoever needs to know something about it asks, and nobody looks at its type. It also
knows the flags of `paceline run` that mean it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from paceline.errors import StrategyError, nearest_first
from paceline.exchange.wire_names import WIRES, check_wire, matrix_rank
from paceline.rules import Rule, Sync
from paceline.split.values import Split

BATCHNORMS = ("exact", "local")
EXCHANGES = ("auto", "shared", "collective")
SERVER_EXCHANGES = ("auto", "tcp")
DURABILITIES = ("none", "log", "replica")
MOST_TIMEOUT_S = 1e7
MOST_SERVERS = 1024
MOST_OUTER_LR = 10.0


class _Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every strategy has."""

    replicas: int = 1  # on all hosts together
    wire: str = "fp32"  # how gradients look on a link
    exchange: str = "auto"
    split: Split | None = None  # how the model of each replica is cut over several devices
    timeout_s: float = 600.0  # the longest any one wait may take

    exchanges: ClassVar[tuple[str, ...]]  # what `exchange` may be

    def __post_init__(self) -> None:
        _check_whole("replicas", self.replicas, 1)
        check_wire(self.wire)
        one_of("exchange", self.exchange, self.exchanges)
        if not 0 < self.timeout_s <= MOST_TIMEOUT_S:
            raise StrategyError("timeout", self.timeout_s, "give a number of seconds above 0")
        if self.split is not None and self.split.parts_of_batch not in (None, self.replicas):
            expected = f"the batch is divided into {self.split.parts_of_batch} by {self.split.words}, give as many"
            raise StrategyError("replicas", self.replicas, expected)

    @property
    def devices(self) -> int:
        """How many devices, each a process, one replica is cut over."""
        return self.split.devices if self.split is not None else 1

    @property
    def processes(self) -> int:
        """How many processes the replicas of all hosts are."""
        return self.replicas * self.devices

    @property
    def settings(self) -> dict[str, object]:
        """Every field by its name, but for what there is none of; in words where it is a value of its own."""
        fields = msgspec.structs.asdict(self)
        return {name: getattr(value, "words", value) for name, value in fields.items() if value}

    def _common_flags(self) -> list[str]:
        flags = _given(self, {"wire": "--wire", "exchange": "--exchange", "timeout_s": "--timeout"})
        return ["--replicas", str(self.replicas), *flags, *(self.split.flags() if self.split is not None else ())]


class Mirrored(_Strategy, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mirrored"):
    """Mirrored replicas: every replica holds a shard of the parameters and applies the updates to just that.

    `exchange`: shared memory inside a host; collective: torch.distributed between all.

    >>> Mirrored(replicas=4, wire="bf16").flags()
    ['--replicas', '4', '--wire', 'bf16']
    """

    batchnorm: str = "exact"  # statistics over the whole batch, or (local) over each replica's part
    table_servers: int = 0  # that hold the sparse embeddings, if any do
    overlap: bool = False  # what hosts have sent is applied while the next forward runs
    every: int = 1  # steps after which hosts exchange what they have come to; 1: gradients, in each step
    gossip: bool = False  # each host with one other, instead of all with all
    outer_momentum: float = 0.0  # of the step that is made of what all hosts have come to
    outer_lr: float = 1.0  # its length; with 1 and no momentum it leads to the mean

    exchanges: ClassVar[tuple[str, ...]] = EXCHANGES
    on_servers: ClassVar[Literal[False]] = False  # whether parameters live on servers
    in_graph: ClassVar[bool] = False
    durable: ClassVar[bool] = False  # whether a server that was killed can be started again

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("batchnorm", self.batchnorm, BATCHNORMS)
        _check_whole("table_servers", self.table_servers, 0, MOST_SERVERS)
        _check_whole("every", self.every, 1)
        self._check_local_steps()
        self._check_overlap()
        if self.split is not None and matrix_rank(self.wire) is not None:
            raise StrategyError("wire", self.wire, "matrices of a cut model lie in parts, give another wire")
        if self.split is not None and self.exchange == "collective":
            raise StrategyError("exchange", self.exchange, "devices of a cut model share memory, leave it out")
        if self.split is not None and self.table_servers:
            raise StrategyError("table_servers", self.table_servers, "a cut model has no tables on servers so far")

    def _check_local_steps(self) -> None:
        if not 0 <= self.outer_momentum < 1:
            raise StrategyError("outer-momentum", self.outer_momentum, "give a number from 0 up to, but not, 1")
        if not 0 < self.outer_lr <= MOST_OUTER_LR:
            raise StrategyError("outer-lr", self.outer_lr, f"give a number above 0, up to {MOST_OUTER_LR:g}")
        outer = {"outer-momentum": (self.outer_momentum, 0.0), "outer-lr": (self.outer_lr, 1.0)}
        for field, value in ((field, value) for field, (value, default) in outer.items() if value != default):
            if self.gossip:
                raise StrategyError(field, value, "no step is made of what all hosts have come to, leave out --gossip")
            if self.every == 1:
                raise StrategyError(field, value, "it is of steps that hosts make by themselves, add --every 8")
        if not self.steps_locally:
            return
        field, given = ("gossip", "set") if self.gossip else ("every", self.every)
        if self.split is not None:
            raise StrategyError(field, given, "hosts exchange the gradients of a cut model at each step so far")
        if self.table_servers:
            raise StrategyError(field, given, "tables on servers are updated at each step, leave it out")
        if matrix_rank(self.wire) is not None:
            raise StrategyError("wire", self.wire, f"it is of gradients, and --{field} sends none, give another wire")
        if self.gossip and self.wire != "fp32":
            raise StrategyError("wire", self.wire, "neighbours exchange the parameters themselves, give fp32")

    def _check_overlap(self) -> None:
        if not self.overlap:
            return
        why = None
        if self.split is not None:
            why = "devices of a cut model wait for one another in each forward anyway, leave it out"
        elif self.table_servers:
            why = "tables on servers are updated before a step returns, leave it out"
        elif self.steps_locally:
            flag = "--gossip" if self.gossip else "--every"
            why = f"with {flag} no gradient is sent that forward could hide, give only one of them"
        if why is not None:
            raise StrategyError("overlap", "set", why)

    @property
    def steps_locally(self) -> bool:
        """Whether each host makes steps of its own, and hosts exchange parameters instead of gradients."""
        return self.every > 1 or self.gossip

    @property
    def makes_outer_steps(self) -> bool:
        """Whether what hosts have come to is a step from where they were, and not simply averaged."""
        return self.outer_momentum != 0.0 or self.outer_lr != 1.0

    @property
    def server_processes(self) -> int:
        """How many servers there have to be."""
        return self.table_servers

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this strategy."""
        tables = ["--only", "sparse", "--servers", str(self.table_servers)] if self.table_servers else []
        own = _given(self, {name: _flag(name) for name in ("batchnorm", "every", "outer_momentum", "outer_lr")})
        set_ = [f"--{name}" for name in ("overlap", "gossip") if getattr(self, name)]
        return [*self._common_flags(), *own, *set_, *tables]


class Centralized(_Strategy, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="centralized"):
    """Parameters on servers, which update them as the rule says; replicas only compute.

    `exchange`: shared memory with servers of the same host; tcp: with none. `servers=0`, with `in_graph`: the process
    of the replicas has the parameters too.

    >>> Centralized(replicas=20, servers=2, rule=Sync(accept=18)).flags()
    ['--replicas', '20', '--servers', '2', '--accept', '18']
    """

    servers: int = 1
    rule: Rule = Sync()
    durability: str = "none"  # where an update is before it is acknowledged
    warmup_steps: int = 0  # which one replica makes alone
    warmup_epochs: int = 0
    in_graph: bool = False  # all replicas as threads of one process

    exchanges: ClassVar[tuple[str, ...]] = SERVER_EXCHANGES
    on_servers: ClassVar[Literal[True]] = True
    batchnorm: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_whole("servers", self.servers, 0 if self.in_graph else 1, MOST_SERVERS)
        if self.wire not in WIRES:
            expected = f"what it owes would not be in checkpoints of servers so far, give one of {', '.join(WIRES)}"
            raise StrategyError("wire", self.wire, expected)
        self.rule.check_replicas(self.replicas)
        one_of("durability", self.durability, DURABILITIES)
        if self.durable and not self.servers:
            expected = "what the one process has ends with it, give --servers 1 or more, or leave it out"
            raise StrategyError("durability", self.durability, expected)
        if self.durability == "replica" and self.servers < 2:
            raise StrategyError("durability", "replica", "it needs another server, give --servers 2 or more, or log")
        _check_whole("warmup-steps", self.warmup_steps, 0)
        _check_whole("warmup-epochs", self.warmup_epochs, 0)
        if self.split is not None and self.in_graph:
            raise StrategyError("in-graph", "set", "devices of a cut model are processes, leave it out")

    @property
    def processes(self) -> int:
        """How many processes the replicas of all hosts are."""
        return 1 if self.in_graph else self.replicas * self.devices

    @property
    def server_processes(self) -> int:
        """How many servers there have to be."""
        return self.servers

    @property
    def durable(self) -> bool:
        """Whether a server that was killed can be started again."""
        return self.durability != "none"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this strategy."""
        own = {"durability": "--durability", "warmup_steps": "--warmup-steps", "warmup_epochs": "--warmup-epochs"}
        in_graph = ["--in-graph"] if self.in_graph else []
        servers = ["--servers", str(self.servers)] if self.servers else []
        flags = [*self._common_flags(), *servers, *self.rule.flags()]
        return [*flags, *_given(self, own), *in_graph]


Strategy = Mirrored | Centralized


def difference(wanted: Strategy, started: Strategy) -> tuple[str, object, object, str] | None:
    """The first field in which two strategies differ: its name, both values, and what to change in the flags of
    `started` to get `wanted`; None if they are the same.

    >>> difference(Mirrored(replicas=2, wire="bf16"), Mirrored(replicas=2, exchange="shared"))
    ('wire', 'bf16', 'fp32', 'with --wire bf16, without --exchange')
    """
    if wanted == started:
        return None
    one, other = wanted.settings, started.settings
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    name = names[0] if wanted.on_servers == started.on_servers else "servers"
    mine, theirs = _by_flag(wanted.flags()), _by_flag(started.flags())
    add = [f"with {' '.join(words)}" for flag, words in mine.items() if theirs.get(flag) != words]
    leave = [f"without {flag}" for flag in theirs if flag not in mine]
    return name.removesuffix("_s"), one.get(name), other.get(name), ", ".join([*add, *leave])


def _by_flag(flags: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in flags:
        (found.setdefault(word, []) if word.startswith("--") else found[next(reversed(found))]).append(word)
    return found


def _given(strategy: _Strategy, flags: dict[str, str]) -> list[str]:
    """The flags of those fields that are not at their default."""
    default = type(strategy)()
    given = [name for name in flags if getattr(strategy, name) != getattr(default, name)]
    return [word for name in given for word in (flags[name], str(getattr(strategy, name)).removesuffix(".0"))]


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def limited(strategy: Strategy, hosts: int, *, restarts: bool) -> str | None:
    """Why calls of such a run cannot be given up at a deadline, in words; None: they can.

    >>> limited(Mirrored(replicas=2), hosts=2, restarts=False)
    'of several hosts'
    """
    if hosts > 1:
        return "of several hosts"
    if strategy.devices > 1:
        return "of a model that is cut"
    if strategy.on_servers:
        return "of replicas that are threads" if strategy.in_graph else None
    if strategy.exchange == "collective":
        return "of replicas that use collectives"
    if strategy.table_servers:
        return "with tables on servers"
    return "that a replica may join (--on-failure restart)" if restarts and strategy.replicas > 1 else None


def one_of(field: str, value: str, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`; else a sentence that names them, the nearest first."""
    if value in choices:
        return value
    raise StrategyError(field, value, f"give one of {', '.join(nearest_first(str(value), choices))}")


def _check_whole(field: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse whatever is not a whole number from `least` up to `most`."""
    if not isinstance(value, int) or value < least:
        raise StrategyError(field, value, f"give a whole number from {least} up")
    if most is not None and value > most:
        raise StrategyError(field, value, f"give at most {most}")
