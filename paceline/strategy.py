"""A strategy is a value: where parameters live, when their owners close a step, how bytes travel.

`Mirrored` is the first: parameters live with the replicas, a shard each; a step closes when all have reported.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import msgspec

from paceline.errors import StrategyError

WIRES = ("fp32", "bf16", "fp16", "int8")
BATCHNORMS = ("exact", "local")
EXCHANGES = ("auto", "shared", "collective")


class Mirrored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mirrored replicas: every replica holds a shard of the parameters and applies the updates to just that.

    >>> Mirrored(replicas=4).wire
    'fp32'
    """

    replicas: int = 1  # on all hosts together
    wire: str = "fp32"  # how gradients look on a link between hosts
    batchnorm: str = "exact"  # statistics over the whole batch, or (local) over each replica's part
    exchange: str = "auto"  # shared memory inside a host; collective: torch.distributed between all
    timeout_s: float = 600.0  # the longest any one wait may take

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise StrategyError("replicas", self.replicas, "give a whole number from 1 up")
        one_of("wire", self.wire, WIRES)
        one_of("batchnorm", self.batchnorm, BATCHNORMS)
        one_of("exchange", self.exchange, EXCHANGES)
        if not self.timeout_s > 0:
            raise StrategyError("timeout", self.timeout_s, "give a number of seconds above 0")


def one_of(field: str, value: str, choices: Sequence[str]) -> str:
    """`value`, if it is one of `choices`; else a sentence that names them, the nearest first."""
    if value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    listed = ", ".join([*near, *(choice for choice in choices if choice not in near)])
    raise StrategyError(field, value, f"give one of {listed}")
