"""The names of wires, as they are typed: `--wire fp32|bf16|fp16|int8|topk:SHARE|powersgd:RANK`. Without torch."""

from __future__ import annotations

import difflib
import math

from paceline.errors import StrategyError

WIRES = ("fp32", "bf16", "fp16", "int8")  # value by value, or by blocks of values; a name says everything
TOPK, POWERSGD = "topk", "powersgd"  # these have a measure of how much travels
MOST_SHARE = 0.5  # of the values; more of them, each with its place, would be about as many bytes as all of them
MOST_RANK = 256
_IN_FULL = {TOPK: "topk:SHARE (such as topk:0.01)", POWERSGD: "powersgd:RANK (such as powersgd:4)"}
_EXPECTED = f"give one of {', '.join((*WIRES, *_IN_FULL.values()))}"


def top_share(name: str) -> float | None:
    """Returns which share of the values travels; None if `name` is of another wire.

    >>> top_share("topk:0.01"), top_share("int8")
    (0.01, None)
    """
    kind, colon, given = name.partition(":")
    if kind != TOPK:
        return None
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not (colon and 0 < share <= MOST_SHARE):
        raise StrategyError("wire", name, f"give the share of the values that travels, up to {MOST_SHARE}: topk:0.01")
    return share


def matrix_rank(name: str) -> int | None:
    """Returns the rank of the matrices that travel; None if `name` is of another wire.

    >>> matrix_rank("powersgd:4"), matrix_rank("fp32")
    (4, None)
    """
    kind, colon, given = name.partition(":")
    if kind != POWERSGD:
        return None
    if not (colon and given.isascii() and given.isdigit() and 1 <= int(given) <= MOST_RANK):
        raise StrategyError("wire", name, f"give the rank of what travels, from 1 to {MOST_RANK}: powersgd:4")
    return int(given)


def check_wire(name: str) -> None:
    """Raises unless there is a wire of that name."""
    if name in WIRES or top_share(name) is not None or matrix_rank(name) is not None:
        return
    near = difflib.get_close_matches(name, (*WIRES, TOPK, POWERSGD), n=1)
    raise StrategyError("wire", name, _EXPECTED + (f" (did you mean {near[0]}?)" if near else ""))
