"""In which order a stage computes its micro-batches."""

from __future__ import annotations

FORWARD, BACKWARD = "forward", "backward"


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Returns what a stage does, one after another, each for a micro-batch.

    With "gpipe" all forwards come first, and all micro-batches are held. With "1f1b" a stage begins backwards as soon
    as it can, and holds at most one more micro-batch than there are stages behind it.

    >>> order("1f1b", 0, 2, 3)  # doctest: +NORMALIZE_WHITESPACE
    [('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    done = [(FORWARD, number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        done += [(FORWARD, number), (BACKWARD, number - ahead)]
    return done + [(BACKWARD, number) for number in range(micro_batches - ahead, micro_batches)]
