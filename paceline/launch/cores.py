"""Which cores a replica gets.

Replicas that share a core, or wander between cores, wait for one another at every step. So each is pinned: with at
least as many cores as replicas, to a block of its own, all blocks equally large because a step is as slow as the
slowest replica; otherwise to one core, shared as evenly as it goes, with a single thread.

Cores are taken in the order of the machine's topology, so that two threads of one physical core lie side by side
and end up in the same block rather than in two replicas that slow each other down.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def share_of_cores(replica: int, replicas: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of one replica; it should run as many threads.

    >>> [share_of_cores(replica, 2, [0, 1, 2, 3, 4]) for replica in range(2)]
    [(0, 1), (2, 3)]
    >>> [share_of_cores(replica, 3, [6, 7]) for replica in range(3)]
    [(6,), (7,), (6,)]
    """
    if replicas > len(cores):
        return (cores[replica % len(cores)],)
    size = len(cores) // replicas
    return tuple(cores[replica * size : (replica + 1) * size])


def allowed_cores() -> list[int]:
    """The cores this process may run on, neighbours in the machine next to each other."""
    return sorted(os.sched_getaffinity(0), key=_where)


def _where(core: int) -> tuple[int, int, int]:
    """Package, physical core, number."""
    folder = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        package, physical = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):  # a kernel that does not say
        return 0, core, core
    return package, physical, core
