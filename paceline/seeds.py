"""Seeds that follow from several numbers: of a run, a step, a member, a micro-batch."""

from __future__ import annotations


def mixed(*numbers: int) -> int:
    """A seed from several numbers, so that neighbouring ones have nothing in common (splitmix64)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed & 0x7FFFFFFFFFFFFFFF
