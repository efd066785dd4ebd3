"""Processes that can sum make the same call of `batches` or `evaluate`, or all raise what says how they differ.

A hash of the call has no variance exactly if all have the same one; only where it has are the calls themselves
exchanged, one process after another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import msgspec
import torch

from paceline.data.script_call import ScriptCall

Total = Callable[[torch.Tensor], torch.Tensor]  # over all processes
_LONGEST_CALL = 2048  # bytes


def agree(call: ScriptCall, total: Total, number: int, count: int) -> None:
    """Returns if all have the same call; this process is the `number`-th of at most `count`."""
    values = [1, *_with_squares(call)]
    members, *sums = total(torch.tensor(values, dtype=torch.int64)).tolist()
    if all(members * squares == value * value for value, squares in zip(sums[::2], sums[1::2], strict=True)):
        return
    text = msgspec.json.encode(call)[:_LONGEST_CALL]
    first: ScriptCall | None = None
    for other in range(count):
        own = torch.zeros(_LONGEST_CALL, dtype=torch.uint8)
        if other == number:
            own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if found := bytes(total(own).tolist()).rstrip(b"\0"):  # else that one has died
            theirs = msgspec.json.decode(found, type=ScriptCall)
            first = first or theirs
            if (difference := theirs.difference(first)) is not None:
                raise difference


def _with_squares(call: ScriptCall) -> Iterable[int]:
    """Returns halves of a hash of the call, but for whose it is, small enough for sums of their squares."""
    text = msgspec.json.encode(msgspec.structs.replace(call, who=""))
    hashed = hashlib.blake2b(text, digest_size=6).digest()
    for half in (int.from_bytes(hashed[:3], "little"), int.from_bytes(hashed[3:], "little")):
        yield from (half, half * half)
