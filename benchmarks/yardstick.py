"""How fast this machine is at the moment: the seconds of a fixed piece of work, half products, half moving memory.

Machines that others use as well change their speed by tens of percent from minute to minute. Two things that were not
measured in the same minute can be compared if the yardstick was laid beside both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

LONG_S = 0.6
_WIDTH = 768
_BYTES = 64 << 20


class Yardstick:
    """A process that has torch loaded, and does its work whenever it is asked."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _answer() -> None:
    import torch

    a, b = torch.randn(_WIDTH, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    source, target = torch.ones(_BYTES // 4), torch.zeros(_BYTES // 4)
    for _ in sys.stdin:
        lasted: list[float] = []
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            began = time.perf_counter()
            torch.mm(a, b)
            target.copy_(source)
            lasted.append(time.perf_counter() - began)
        print(sorted(lasted)[len(lasted) // 4], flush=True)


if __name__ == "__main__":
    _answer()
