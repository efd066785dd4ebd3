"""On what the figures were measured."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import torch

from paceline.launch.cores import allowed_cores


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the ratios depend on."""

    processor: str
    cores: int
    memory_gib: int
    system: str
    python: str
    torch: str

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        return (
            f"{self.processor}, {cores}, {self.memory_gib} GiB, {self.system}, Python {self.python}, torch {self.torch}"
        )


def this_machine() -> Machine:
    return Machine(
        processor=_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cores=len(allowed_cores()),
        memory_gib=round(int(_field(Path("/proc/meminfo"), "MemTotal").split()[0]) / 2**20),
        system=f"{platform.system()} {platform.release().partition('-')[0]}",  # whoever has built it
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
