"""What tests of emulated hosts have in common."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from paceline.launch.emulate import check_permission

ROUNDING = 1e-5  # others add up the same numbers in other groups: float sums differ by that, and nothing else may
END_S = 170.0

# What a host says of the first one when its own link is down: its kernel may know before the silence is too long.
CUT_OFF_FROM_HOST_0 = (
    r"host 0 is gone \((it has been silent for 3 s|the connection broke .*unreachable\))\); the run ends"
)


def may_emulate() -> bool:
    try:
        check_permission()
    except Exception:
        return False
    return True


needs_hosts = pytest.mark.skipif(not may_emulate(), reason="emulated hosts need root and iproute2")


def wait_until(ready: Callable[[], object], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
