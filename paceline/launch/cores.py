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

# How often a thread of torch's looks for more work before it sleeps: for about a tenth of a millisecond. By itself it
# would do so for thirty times as long, on a core that a server, or another process of the run, has work for.
_SPINS = "10000"
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


def thread_variables(threads: int) -> dict[str, str]:
    """The variables that give a new process's torch so many threads; how they wait, unless the user has said that."""
    count = str(threads)
    waits = {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() else {"GOMP_SPINCOUNT": _SPINS}
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, **waits}


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
