"""Which machine this is, and what it has left. Does not import torch: it is asked before anything is started."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from paceline.errors import LaunchError


def free_memory() -> int:
    """Bytes that can still be had: of the machine, or of the control group if that is less."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or one of another version: the machine's own figure stands
    return free


@cache
def installed_version(package: str) -> str:
    """The version of a package, without importing it. Looking it up takes some milliseconds, once."""
    from importlib.metadata import version

    return version(package)


def machine_identity() -> str:
    """The same for two processes that can share memory: one kernel, and (emulated hosts differ in it) one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def shared_words_work() -> bool:
    """Whether processes may agree by plain words in shared memory: a write that came first must be seen first.

    x86-64 keeps that order. Others, such as ARM, do not without barriers, which Python cannot make; there replicas
    exchange by collectives until it has been run there.
    """
    return platform.machine() in ("x86_64", "AMD64")


def check_shared_words(what: str) -> None:
    """Refuse `what`, which needs shared words, where they do not work."""
    if not shared_words_work():
        raise LaunchError(
            f"{what} on this processor ({platform.machine()}): that relies on the memory order of x86-64; "
            "pl.Trainer with --replicas works here, by collectives"
        )


@cache
def has_wide_instructions_of_amd() -> bool:
    """Whether this is a processor of AMD's with AVX-512."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value)
    return found.get("vendor_id", "").strip() == "AuthenticAMD" and "avx512f" in found.get("flags", "").split()
