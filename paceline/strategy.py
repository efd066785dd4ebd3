"""A strategy is a value: where parameters live, when their owners close a step, how bytes travel.

`Mirrored`: parameters live with the replicas, a shard each; a step closes when all have reported.
`Centralized`: they live on servers; a `Rule` says when a step closes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.errors import StrategyError, nearest_first
from paceline.exchange import WIRES
from paceline.rules import Rule, Sync
from paceline.split.values import Split

BATCHNORMS = ("exact", "local")
EXCHANGES = ("auto", "shared", "collective")
SERVER_EXCHANGES = ("auto", "tcp")
DURABILITIES = ("none", "log", "replica")


class Mirrored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mirrored"):
    """Mirrored replicas: every replica holds a shard of the parameters and applies the updates to just that.

    >>> Mirrored(replicas=4).wire
    'fp32'
    """

    replicas: int = 1  # on all hosts together
    wire: str = "fp32"  # how gradients look on a link between hosts
    batchnorm: str = "exact"  # statistics over the whole batch, or (local) over each replica's part
    exchange: str = "auto"  # shared memory inside a host; collective: torch.distributed between all
    servers: int = 0  # that hold the sparse embeddings, if any do
    split: Split | None = None  # how the model of each replica is cut over several devices
    timeout_s: float = 600.0  # the longest any one wait may take

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise StrategyError("replicas", self.replicas, "give a whole number from 1 up")
        one_of("wire", self.wire, WIRES)
        one_of("batchnorm", self.batchnorm, BATCHNORMS)
        one_of("exchange", self.exchange, EXCHANGES)
        if self.split is not None and self.exchange == "collective":
            raise StrategyError("exchange", self.exchange, "devices of a cut model share memory, leave it out")
        if not self.timeout_s > 0:
            raise StrategyError("timeout", self.timeout_s, "give a number of seconds above 0")

    @property
    def on_servers(self) -> bool:
        """Whether the parameters live on servers."""
        return False

    @property
    def devices(self) -> int:
        """How many devices, each a process, one replica is cut over."""
        return self.split.devices if self.split is not None else 1


class Centralized(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="centralized"):
    """Parameters on servers, which update them as the rule says; replicas only compute.

    >>> Centralized(replicas=20, servers=2, rule=Sync(accept=18)).rule.accept
    18
    """

    replicas: int = 1
    servers: int = 1
    rule: Rule = Sync()
    wire: str = "fp32"  # how gradients look over TCP
    exchange: str = "auto"  # shared memory with servers of the same host; tcp: with none
    durability: str = "none"  # where an update is before it is acknowledged
    warmup_steps: int = 0  # which one replica makes alone
    warmup_epochs: int = 0
    in_graph: bool = False  # all replicas as threads of one process
    split: Split | None = None  # how the model of each replica is cut over several devices
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise StrategyError("replicas", self.replicas, "give a whole number from 1 up")
        if self.servers < 1:
            raise StrategyError("servers", self.servers, "give at least 1")
        accept = self.rule.accept if isinstance(self.rule, Sync) else None
        if isinstance(accept, int) and accept > self.replicas:
            raise StrategyError("accept", accept, f"give at most the number of replicas, which is {self.replicas}")
        one_of("wire", self.wire, WIRES)
        one_of("exchange", self.exchange, SERVER_EXCHANGES)
        one_of("durability", self.durability, DURABILITIES)
        if self.durability == "replica" and self.servers < 2:
            raise StrategyError("durability", "replica", "it needs another server, give --servers 2 or more, or log")
        if self.warmup_steps < 0 or self.warmup_epochs < 0:
            raise StrategyError("warmup", min(self.warmup_steps, self.warmup_epochs), "give a number from 0 up")
        if self.split is not None and self.in_graph:
            raise StrategyError("in-graph", "set", "devices of a cut model are processes, leave it out")
        if not self.timeout_s > 0:
            raise StrategyError("timeout", self.timeout_s, "give a number of seconds above 0")

    @property
    def on_servers(self) -> bool:
        """Whether the parameters live on servers."""
        return True

    @property
    def batchnorm(self) -> str:
        """Statistics are each replica's own."""
        return "local"

    @property
    def devices(self) -> int:
        """How many devices, each a process, one replica is cut over."""
        return self.split.devices if self.split is not None else 1


Strategy = Mirrored | Centralized


def one_of(field: str, value: str, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`; else a sentence that names them, the nearest first."""
    if value in choices:
        return value
    raise StrategyError(field, value, f"give one of {', '.join(nearest_first(value, choices))}")
