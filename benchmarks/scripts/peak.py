"""The most memory a process takes, while a part of a script runs: its own, and its share of what it shares (PSS)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def now() -> int:
    """Bytes, without the files it maps: libraries are not the training's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])


@contextmanager
def peak(path: Path | None, device: int = 0) -> Iterator[None]:
    """Writes how much more than now it takes at most, looking all the time. Without a path nothing is done."""
    if path is None:
        yield
        return
    before = most = now()
    end = threading.Event()

    def look() -> None:
        nonlocal most
        while not end.wait(0.002):
            most = max(most, now())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        end.set()
        looking.join()
    path.with_name(f"{path.name}-{device}").write_text(str(most - before))
