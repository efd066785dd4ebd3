"""The machines that a plan is for: how many, with how many cores, and what is between them."""

from __future__ import annotations

import re

import msgspec

from paceline.errors import InvalidInput, nearest_first
from paceline.plan.devices import DEVICES, DescribedDevice

MOST_HOSTS = 1024
MOST_CORES = 1024
# Names of links that people say without a rate.
LINKS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10, "25gbit": 2.5e10, "40gbit": 4e10, "100gbit": 1e11}
MOST_LINK_BITS = 1e12
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(mbit|gbit)")
_UNITS = {"mbit": 1e6, "gbit": 1e9}


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal machines, each with its own link to one switch.

    >>> Cluster(hosts=8, cores=4, link="10gbit", memory_bytes=2**34).devices
    32
    """

    hosts: int
    cores: int  # of each host: as many devices, unless a device is described
    memory_bytes: int  # of each host
    link: str | None = None  # None: one host
    device: str | None = None  # described; None: the cores here
    devices_a_host: int | None = None  # described devices
    emulated: bool = False  # hosts on one machine
    hosts_a_core: float = 1.0  # emulated ones that share a core

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise InvalidInput("hosts", self.hosts, f"give 1 to {MOST_HOSTS}")
        if not 1 <= self.cores <= MOST_CORES:
            raise InvalidInput("cores", self.cores, f"give 1 to {MOST_CORES}")
        if self.hosts > 1 and self.link is None:
            raise InvalidInput("hosts", self.hosts, "say what is between them, --link 1gbit")
        if self.link is not None:
            link_bits(self.link)
        if self.device is not None:
            described(self.device)

    @property
    def devices(self) -> int:
        """How many there are on all hosts."""
        return self.hosts * self.devices_of_host

    @property
    def devices_of_host(self) -> int:
        return self.cores if self.devices_a_host is None else self.devices_a_host

    @property
    def link_bytes_per_s(self) -> float:
        """Of each host's link, each way."""
        return link_bits(self.link) / 8 if self.link is not None else float("inf")

    @property
    def words(self) -> str:
        """Returns it as a plan shows it."""
        cores = f"{self.cores} cores" if self.cores > 1 else "one core"
        what = f"{self.devices_of_host} × {self.device}" if self.device else cores
        hosts = f"{self.hosts} hosts of {what}" if self.hosts > 1 else f"one host of {what}"
        link = f", {self.link} links" if self.link is not None and self.hosts > 1 else ""
        return f"{hosts}{link}{', emulated' if self.emulated else ''}"


def link_bits(link: str) -> float:
    """
    >>> link_bits("10gbit"), link_bits("250mbit")
    (10000000000.0, 250000000.0)
    """
    rate = _RATE.fullmatch(link)
    if rate is None or not 1e6 <= float(rate[1]) * _UNITS[rate[2]] <= MOST_LINK_BITS:
        known = ", ".join(nearest_first(link, list(LINKS)))
        raise InvalidInput("link", link, f"give a rate such as {known}")
    return float(rate[1]) * _UNITS[rate[2]]


def described(name: str) -> DescribedDevice:
    """Returns a described device; a sentence with all of them for another name."""
    if name not in DEVICES:
        raise InvalidInput("device", name, f"give one of {', '.join(nearest_first(name, list(DEVICES)))}")
    return DEVICES[name]
