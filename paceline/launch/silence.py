"""Who has been silent for too long: a host that is gone may not close its connections, nor one that is stopped.

All say every now and then that they are still here. A host that was stopped itself, or had no processor, has heard
nobody meanwhile through no fault of theirs: that time does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

_LOOKS_A_LIMIT = 10  # how often one says that one is here, in the time after which one would be taken to be gone


class Silence:
    """When each host was last heard. `heard` may be called by other threads."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._pause_s = longest_s / _LOOKS_A_LIMIT
        self._heard: dict[int, float] = {}
        self._spoke_at = 0.0
        self._looked_at = time.monotonic()

    def heard(self, host: int) -> None:
        self._heard[host] = time.monotonic()

    def time_to_speak(self) -> bool:
        now = time.monotonic()
        if now - self._spoke_at < self._pause_s:
            return False
        self._spoke_at = now
        return True

    def gone(self, hosts: Iterable[int]) -> list[int]:
        """Those of the hosts that have not been heard for too long."""
        now = time.monotonic()
        missed_s, self._looked_at = now - self._looked_at, now
        if missed_s > self._pause_s:
            for host, at in list(self._heard.items()):
                self._heard[host] = max(at, min(now, at + missed_s))
        return [host for host in hosts if now - self._heard.get(host, now) > self._longest_s]
