"""What tests of emulated hosts have in common."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from paceline.launch.emulate import check_permission

ROUNDING = 1e-5  # others add up the same numbers in other groups: float sums differ by that, and nothing else may
END_S = 170.0


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
