"""Hosts that come to a run in progress: host 0 has them wait outside, or tells them why they cannot join.

One that has died may be back before host 0 has noticed its death: it waits for that, for as long as a host that falls
silent would be waited for. If the one before is still there by then, two hosts have the same number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from paceline.errors import LaunchError, PacelineError, StrategyError
from paceline.launch.host_messages import HostComes, HostMessage, RunRefused
from paceline.net.frames import Channel, ConnectionLost

_SEND_S = 10.0


@dataclass(frozen=True)
class Arrived:
    """A connection to a host that has shown who it is; the message is what it has come with."""

    channel: Channel[HostMessage]
    address: str  # of this machine on that connection, for a host that has not come with its servers' addresses yet
    comes: HostComes | None = None


class Latecomers:
    """Who has come since the run began, and has not been let in."""

    def __init__(self, check: Callable[[HostComes], None], lost_after_s: float) -> None:
        """`check` raises if a host was not asked for the same as host 0."""
        self._check, self._lost_after_s = check, lost_after_s
        self._arrived: dict[int, tuple[HostComes, Channel[HostMessage], float]] = {}  # with until when they wait
        self.outside: set[int] = set()  # hosts with a connection, that are not in the run so far

    def came(self, comes: HostComes, channel: Channel[HostMessage]) -> None:
        """A host is at the door."""
        if comes.host in self._arrived:
            self._send_away(channel, StrategyError("node-rank", comes.host, "two hosts have it, give each its own"))
        else:
            self._arrived[comes.host] = (comes, channel, time.monotonic() + self._lost_after_s)

    def take(self, there: Container[int], *, over: bool) -> list[tuple[HostComes, Channel[HostMessage]]]:
        """Returns those that wait outside from now on. `there`: the hosts with a connection. `over`: the run is."""
        taken = []
        for host, (comes, channel, until) in list(self._arrived.items()):
            try:
                self._check(comes)
                if over:
                    raise LaunchError("the run has ended before this host could join")
                if host in there:
                    if time.monotonic() < until:
                        continue
                    raise StrategyError("node-rank", host, "another host has it, give this one its own")
                taken.append((comes, channel))
                self.outside.add(host)
            except PacelineError as error:
                self._send_away(channel, error)
            del self._arrived[host]
        return taken

    @staticmethod
    def _send_away(channel: Channel[HostMessage], why: PacelineError) -> None:
        with contextlib.suppress(ConnectionLost):
            channel.send(RunRefused(sentence=str(why)), timeout_s=_SEND_S)
        channel.close()

    def close(self) -> None:
        """Send all of them away."""
        for _, channel, _ in self._arrived.values():
            self._send_away(channel, LaunchError("the run has ended before this host could join"))
        self._arrived.clear()
