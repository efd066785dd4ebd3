"""Several hosts on one machine, with links of a real speed: `paceline run --emulate hosts=2,link=1gbit`.

A strategy for several hosts is only worth what it does on their link. Here every host is a network namespace
and every link a veth pair to a bridge, limited by the kernel's token bucket, so that the processes inside use
the sockets, addresses and bandwidth that they would have on real machines.

      namespace …-h0          namespace …-switch           namespace …-h1
    ┌────────────────┐      ┌────────────────────┐       ┌────────────────┐
    │ lo  10.213.0.1 │      │       bridge       │       │ 10.213.0.2  lo │
    │           eth0 ┼──────┼ h0              h1 ┼───────┼ eth0           │
    └────────────────┘      └────────────────────┘       └────────────────┘

Both ends of a link are limited, eth0 for what the host sends and its port at the bridge for what it receives:
a link is as fast as it says, in both directions at once, whoever sends. Headers count, as on a cable: of the
rate, 96 % are left for what a socket sends. What the machine itself cannot carry, no rate will make it carry.

The bridge has a namespace of its own: the machine's network is not touched, no packet can leave, and two
emulations may use the same addresses. Only the network is apart: hosts share files and /dev/shm.

Namespaces stay when the process that made them is killed. Their names therefore say whose they are, and each
start removes those whose maker is gone:

    paceline-<pid>-<when that process started>-<which emulation>-h0

The start time is in the name because a pid comes back: in a container, often at the next run.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError, StrategyError
from paceline.launch.signals import signals_later

_EXAMPLE = "hosts=2,link=1gbit"
_KEYS = ("hosts", "link")
_MOST_HOSTS = 64
_SUBNET = "10.213.0.0/24"
_BITS_PER_S = {"mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(mbit|gbit)")
_NAMESPACE = re.compile(r"paceline-(\d+)-(\d+)-\w+-(?:switch|h\d+)")


@dataclass(frozen=True)
class Emulation:
    """How many hosts to emulate, and how fast the link of each is.

    >>> Emulation.parse("hosts=2,link=1gbit")
    Emulation(hosts=2, link='1gbit', fewest=None)
    """

    hosts: int
    link: str
    fewest: int | None = None  # that are started, if others may join; None: all

    def __post_init__(self) -> None:
        if not 2 <= self.hosts <= _MOST_HOSTS or not 1 <= (self.fewest or 1) <= self.hosts:
            raise _wrong_hosts(self.hosts if self.fewest is None else f"{self.fewest}:{self.hosts}")
        if not _RATE.fullmatch(self.link) or not 1e6 <= self.bits_per_s <= 100e9:
            expected = "give a rate from 1mbit to 100gbit, such as 100mbit, 1gbit or 10gbit"
            raise StrategyError("emulate's link", self.link, expected)

    @property
    def bits_per_s(self) -> float:
        """The speed of each link, in each direction."""
        rate = _RATE.fullmatch(self.link)
        assert rate, self.link
        return float(rate[1]) * _BITS_PER_S[rate[2]]

    @classmethod
    def parse(cls, text: str, *, may_join: bool = False) -> Emulation:
        """Read what stands after `--emulate`; `may_join`: hosts=2:4 has two at the start, and up to four."""
        given: dict[str, str] = {}
        for item in text.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise StrategyError("emulate", text, f"{item!r} has no value, write it as {_EXAMPLE}")
            if key not in _KEYS:
                nearest = difflib.get_close_matches(key, _KEYS, n=1)
                hint = f" (did you mean {nearest[0]}?)" if nearest else ""
                raise StrategyError("emulate", text, f"{key!r} is not one of {', '.join(_KEYS)}{hint}")
            if key in given:
                raise StrategyError("emulate", text, f"{key} is given twice, write it as {_EXAMPLE}")
            given[key] = value
        for key in _KEYS:
            if key not in given:
                raise StrategyError("emulate", text, f"{key} is missing, write it as {_EXAMPLE}")
        fewest, colon, most = given["hosts"].rpartition(":")
        if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", given["hosts"]) or (colon and not may_join):
            raise _wrong_hosts(given["hosts"])
        return cls(int(most), given["link"], int(fewest) if colon else None)


def _wrong_hosts(value: object) -> StrategyError:
    return StrategyError("emulate's hosts", value, f"give a whole number from 2 to {_MOST_HOSTS}")


def is_emulated_host() -> bool:
    """Whether this process runs on one."""
    return _NAMESPACE.fullmatch(_run("ip", "netns", "identify", str(os.getpid())).strip()) is not None


def check_permission() -> None:
    """Raise `LaunchError` with the reason if hosts cannot be emulated here, by emulating two for a moment."""
    if os.geteuid() != 0:
        raise LaunchError(
            f"--emulate makes network namespaces, which only root may, and this is user {os.geteuid()}:"
            " run it as root, or leave --emulate out"
        )
    for tool in ("ip", "tc"):
        _find(tool)
    with signals_later():
        EmulatedHosts(Emulation(2, "1gbit")).close()


class EmulatedHosts:
    """Namespaces that are hosts, with their links, until `close`.

    Lists are by host: `names` of the namespaces, `addresses` under which the other hosts reach them.
    `interface` is the name of the link inside each.
    """

    interface = "eth0"

    def __init__(self, emulation: Emulation) -> None:
        remove_stale()
        prefix = f"paceline-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(3)}"
        self._switch = f"{prefix}-switch"
        self.names = [f"{prefix}-h{host}" for host in range(emulation.hosts)]
        self.addresses = [f"10.213.0.{host + 1}" for host in range(emulation.hosts)]
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for host in range(emulation.hosts):
                self._plug_in(host, emulation)
        except BaseException:
            self.close()
            raise

    def _plug_in(self, host: int, emulation: Emulation) -> None:
        name, port = self.names[host], f"h{host}"
        _run("ip", "netns", "add", name)
        # Made inside the switch, with the other end put straight into the host: the machine never sees it.
        veth = ("type", "veth", "peer", "name", self.interface, "netns", name)
        _run("ip", "-n", self._switch, "link", "add", port, *veth)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        address, link = self.addresses[host], ("dev", self.interface)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", *link, "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "noprefixroute", *link)
        # The congestion control that this machine prefers is no property of the link: take Linux's usual one.
        _run("ip", "-n", name, "route", "add", _SUBNET, *link, "src", address, "congctl", "cubic")
        # The bucket has to hold what passes until the kernel looks again, and in any case one of its largest
        # packets (64 KB and headers): when it held 64 KB, so that these were cut up in front of it, a link of
        # 1gbit gave only two thirds of that when used both ways at once.
        burst_bytes = max(128 * 1024, int(emulation.bits_per_s / 8 * 0.0005))
        limit = ("tbf", "rate", emulation.link, "burst", str(burst_bytes), "latency", "50ms")
        _run("tc", "-n", name, "qdisc", "add", *link, "root", *limit)
        _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, "root", *limit)

    def command(self, host: int, argv: list[str]) -> list[str]:
        """The command line that runs `argv` on that host, in the very process that is started with it."""
        return [_find("ip"), "netns", "exec", self.names[host], *argv]

    def close(self) -> None:
        """Remove everything; may be called again. Processes still on a host lose its network at once."""
        for name in {*self.names, self._switch} & set(_namespaces()):
            _delete(name)

    def __enter__(self) -> EmulatedHosts:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def remove_stale() -> list[str]:
    """Remove the namespaces whose maker is gone, and name them."""
    stale = []
    for name in _namespaces():
        made = _NAMESPACE.fullmatch(name)
        if made and _started(int(made[1])) != int(made[2]):
            _delete(name)
            stale.append(name)
    return stale


def _started(pid: int) -> int | None:
    """When that process started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets and may hold anything; state is the third, start the 22nd.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _delete(name: str) -> None:
    try:
        _run("ip", "netns", "delete", name)
    except LaunchError:
        if name in _namespaces():  # otherwise another supervisor, starting now, was faster
            raise


def _find(tool: str) -> str:
    # A root shell need not have the folders of the system's own commands in its PATH.
    path = shutil.which(tool, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if path is None:
        raise LaunchError(f"--emulate needs the command `{tool}`, which is missing: install iproute2")
    return path


def _run(tool: str, *arguments: str) -> str:
    # In a session of its own: a Ctrl-C meant for the supervisor must not stop its cleaning up halfway.
    done = subprocess.run([_find(tool), *arguments], capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        reason = done.stderr.strip().replace("\n", ", ") or f"exit code {done.returncode}"
        raise LaunchError(
            f"--emulate could not run `{tool} {' '.join(arguments)}` ({reason}): it needs a kernel with"
            " network namespaces, veth, bridge and tbf, and a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
    return done.stdout
