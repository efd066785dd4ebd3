"""Where the supervisors of several hosts meet: host 0 listens at the rendezvous, and all others come to it.

A run whose servers are spread over hosts needs more than its replicas know: where all servers listen, that everybody
was started with the same flags, and later who has ended. So every supervisor keeps one connection to host 0's for as
long as the run lasts. What one host says all others hear, passed on by host 0. That a connection ends is a message too:
with a supervisor die all its processes, so its host is gone; so is one that falls silent without a word (`silence.py`).

    host 1 ──comes, its servers are at …──▶ host 0 ◀──comes── host 2        the same flags? then:
    host 1 ◀──────begins, all servers are at …────── host 0 ──────▶ host 2  … training …
    host 1 ──finished──▶ host 0 ◀──finished── host 2                        all have: over

Where hosts may join (`fewest` of them are enough to begin), host 0 goes on listening. Who comes later is told that the
run has begun, and is outside of it until it is let in (`view_keeper.py`): nobody waits for it, or ends with it.

Threads do what may take long (connecting, greeting, reading) and leave what has come in a queue; the one thread that
decides finds a byte in a pipe (`descriptor`), as it does for everything else that happens.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

from paceline.errors import LaunchError, PacelineError, StrategyError
from paceline.launch.host_greeting import OtherVersion
from paceline.launch.host_messages import (
    HostComes,
    HostFinished,
    HostLost,
    HostMessage,
    HostReady,
    RunBegins,
    RunOver,
    RunRefused,
    StillHere,
    ViewMessage,
    ViewProposed,
)
from paceline.launch.latecomers import Arrived, Latecomers
from paceline.launch.meeting_door import HostsSetting, MeetingDoor
from paceline.launch.silence import Silence
from paceline.net.frames import Channel, ConnectionLost

SEND_S = 10.0
LATE_S = 60.0  # that host 0 stays for hosts that come after it is known that there will be no run
MOMENT_S = 3.0  # for more hosts, when there are enough to begin


class Meeting:
    """This host's part of the meeting. For one thread, which looks at `descriptor` and calls `news`."""

    def __init__(self, setting: HostsSetting, say: Callable[[str], None]) -> None:
        self._setting = setting
        self._say = say
        self._refused: PacelineError | None = None  # why there will be no run
        self._came = 0  # hosts, to host 0
        self._enough_at: float | None = None  # when there were enough of them to begin
        self._late = Latecomers(self._check, setting.lost_after_s)
        self._inbox: queue.SimpleQueue[tuple[int, HostMessage | Arrived | PacelineError]] = queue.SimpleQueue()
        self.descriptor, self._wake = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._wake, False)
        self._links: dict[int, Channel[HostMessage]] = {}  # by host; but for host 0 there is only that to it
        self._finished: dict[int, HostFinished] = {}  # by host
        self._silence = Silence(setting.lost_after_s)
        self.code: int | None = None  # of the run, once it is over
        self._door = MeetingDoor(setting, self._put, say)

    # ── before the run ───────────────────────────────────────────────────────────────────────────────────

    def address(self) -> str | None:
        """An address of this machine that the others reach; None: it is not known before host 0 has been reached."""
        if self._door.address is not None:
            return self._door.address
        for _, message in self._take():
            if isinstance(message, PacelineError):
                raise message
            if isinstance(message, Arrived):
                self._links[0] = message.channel
                return message.address
        return None

    def gather(self, servers: Mapping[int, str], container: str) -> Callable[[], RunBegins | None]:
        """Tell that this host's servers listen at these addresses. Returns what is to be asked until it answers; it
        raises when there will be no run. `container`: its name, if this is host 0."""
        own = self._own = HostComes(
            host=self._setting.host, settings=dict(self._setting.settings), servers=dict(servers)
        )
        if self._setting.host:
            self._read_from(0)
            self._send(0, own)
            return self._begins
        come = {0: own}
        return lambda: self._all_are_there(come, container)

    def _begins(self) -> RunBegins | None:
        taken = self._take()
        for number, (_, message) in enumerate(taken):
            if isinstance(message, RunBegins):
                for host, later in taken[number + 1 :]:
                    self._put(host, later)
                return message
            if isinstance(message, RunRefused):
                raise LaunchError(message.sentence)
            if isinstance(message, HostLost):
                raise LaunchError(f"host 0 has ended before the run began ({message.why}): see its output")
        return None

    def _all_are_there(self, come: dict[int, HostComes], container: str) -> RunBegins | None:
        """Take in who has come. What is wrong with one is said to all, since nobody can go on without it."""
        for host, message in self._take():
            if isinstance(message, Arrived) and message.comes is not None:
                if self._setting.fewest is not None and message.comes.host in come:
                    self._late.came(message.comes, message.channel)  # the one before may be gone
                    continue
                self._came += 1
                try:
                    if self._refused is None:
                        self._check(message.comes)
                        if message.comes.host in come:
                            raise StrategyError("node-rank", message.comes.host, "two hosts have it, give each its own")
                except PacelineError as error:
                    self._refuse(error)
                if self._refused is not None:
                    self._links[-self._came] = message.channel
                    self._send(-self._came, RunRefused(sentence=str(self._refused)))
                    continue
                come[message.comes.host] = message.comes
                self._connect(message.comes.host, message.channel)
            elif isinstance(message, OtherVersion):
                self._came += 1
                self._refuse(message)
            elif isinstance(message, HostLost) and self._setting.fewest is not None:
                self._drop(host)  # it may come again
                come.pop(host, None)
            elif isinstance(message, HostLost):
                self._refuse(LaunchError(f"host {host} has ended before the run began ({message.why}): see its output"))
        for comes, channel in self._late.take(self._links, over=False):
            self._late.outside.discard(comes.host)
            come[comes.host] = comes
            self._connect(comes.host, channel)
        missing = self._missing(come)
        if missing and self._refused is None and time.monotonic() > self._door.give_up_at:
            self._refuse(
                LaunchError(
                    f"host {missing[0]} has not come to {self._setting.rendezvous} within "
                    f"{self._setting.timeout_s:g} s: start it with --node-rank {missing[0]}, or give --timeout more"
                )
            )
        all_were_here = self._came >= self._setting.hosts - 1
        if self._refused is not None and (all_were_here or time.monotonic() > self._door.give_up_at):
            raise self._refused
        if missing:
            return None
        addresses = {number: address for one in come.values() for number, address in one.servers.items()}
        ordered = [addresses[number] for number in sorted(addresses)]
        begins = RunBegins(container=container, addresses=ordered, hosts=sorted(come))
        if self._setting.fewest is None:
            self._door.shut()
        for host in list(self._links):
            self._send(host, begins)
        return begins

    def _missing(self, come: Mapping[int, HostComes]) -> list[int]:
        """The hosts without which the run does not begin: it waits a moment for those that need not be there."""
        missing = [host for host in range(self._setting.hosts) if host not in come]
        if len(come) < (self._setting.fewest or self._setting.hosts):
            self._enough_at = None
            return missing
        now = time.monotonic()
        self._enough_at = self._enough_at or now
        return missing if now < self._enough_at + MOMENT_S else []

    def _check(self, comes: HostComes) -> None:
        here = self._own.settings
        for name in dict.fromkeys((*here, *comes.settings)):
            theirs, ours = comes.settings.get(name, "not given"), here.get(name, "not given")
            if theirs != ours:
                expected = f"that is host {comes.host}'s, and host 0 has {ours!r}, give every host the same"
                raise StrategyError(name, theirs, expected)

    def _refuse(self, error: PacelineError) -> None:
        """There will be no run. Who comes later is told so too, for a while."""
        if self._refused is None:
            self._refused = error
            self._door.give_up_at = min(self._door.give_up_at, time.monotonic() + LATE_S)
            for host in list(self._links):
                self._send(host, RunRefused(sentence=str(error)))

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────

    def tell(self, message: HostMessage) -> None:
        """Have all other hosts hear that."""
        if isinstance(message, ViewProposed):
            self._late.outside -= message.rows.keys()
        for host in list(self._links):
            self._send(host, message)

    def tell_first(self, message: HostMessage) -> None:
        """Have host 0 hear that, which may be this one."""
        if self._setting.host:
            if 0 in self._links:
                self._send(0, message)
        else:
            self._put(0, message)

    def news(self) -> list[HostMessage]:
        """What was heard since the last look. Host 0 passes on what one says to the others; what is about views is
        between it and that one."""
        self._listen_for_silence()
        heard: list[HostMessage] = []
        for host, message in self._take():
            if isinstance(message, Arrived) and message.comes is not None:
                self._late.came(message.comes, message.channel)
            elif host in self._late.outside and not isinstance(message, HostLost | HostReady):
                continue  # what happens there is no business of the run
            if isinstance(message, HostLost) and message.host == host:
                if host not in self._links:
                    continue  # that is known
                self._drop(host)
                if self.code is not None:
                    continue  # it was free to go
            if isinstance(message, HostFinished):
                self._finished[host] = message
            elif isinstance(message, RunOver):
                self.code = message.code
            elif isinstance(message, ViewMessage):
                heard.append(message)
            elif not isinstance(message, Arrived | PacelineError | StillHere):
                heard.append(message)
                for other in [other for other in self._links if other != host]:
                    self._send(other, message)
        heard += self._let_come()
        self._look_whether_over()
        return heard

    def _let_come(self) -> list[HostMessage]:
        """Hosts that have come to a run in progress wait outside of it."""
        heard: list[HostMessage] = []
        for comes, channel in self._late.take(self._links, over=self.code is not None):
            self._finished.pop(comes.host, None)
            self._connect(comes.host, channel)
            self._send(comes.host, RunBegins(container="", addresses=[], hosts=sorted(self._inside()), joins=True))
            heard.append(comes)
        return heard

    def _inside(self) -> set[int]:
        return {0, *self._links} - self._late.outside

    def refuse(self, host: int, why: str) -> None:
        """Send away a host that would join the run."""
        self._send(host, RunRefused(sentence=f"this host cannot join the run: {why}"))

    def speak(self) -> None:
        """Says now and then that this host is still here; to be called also while something else is waited for."""
        if self._silence.time_to_speak():
            self.tell(StillHere())

    def _listen_for_silence(self) -> None:
        """Says that this host is still here, and finds those who have not said so for too long."""
        self.speak()
        for host in self._silence.gone(self._links):
            why = f"it has been silent for {self._setting.lost_after_s:g} s"
            if self._setting.host == 0:  # who goes on without whom is its to say
                self._send(host, HostLost(host=host, why=why))  # in case that it hears
            self._put(host, HostLost(host=host, why=why))

    def finish(self, code: int, *, trained: bool) -> None:
        """All replicas of this host have ended, as said. Called until the run is over: until `code` is known."""
        own, host = HostFinished(code=code, trained=trained), self._setting.host
        if host and 0 not in self._links:
            self.code = code
        elif self._finished.get(host) != own:
            self._finished[host] = own
            if host:
                self._send(0, own)
        self._look_whether_over()

    def leave(self) -> None:
        """Wait for nobody any more: for the others this host is gone."""
        for host in list(self._links):
            self._drop(host)

    def _all_finished(self) -> bool:
        return self._inside() <= self._finished.keys()

    def _look_whether_over(self) -> None:
        """Host 0 says when the run is over, and how it has ended: well, if it has for anybody and nobody has failed."""
        if self._setting.host or self.code is not None or not self._all_finished():
            return
        codes = [ended.code for _, ended in sorted(self._finished.items()) if ended.trained]
        lost = [ended.code for _, ended in sorted(self._finished.items())]
        self.code = next((code for code in codes if code), 0 if codes else lost[0])
        self.tell(RunOver(code=self.code))

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self) -> list[tuple[int, HostMessage | Arrived | PacelineError]]:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._inbox.get_nowait())
        return taken

    def _put(self, host: int, message: HostMessage | Arrived | PacelineError) -> None:
        self._inbox.put((host, message))
        with contextlib.suppress(OSError):  # the pipe is full, so it wakes anyway; or the end has come
            os.write(self._wake, b"\0")

    def _send(self, host: int, message: HostMessage) -> None:
        with contextlib.suppress(ConnectionLost):  # whoever reads there finds it too
            self._links[host].send(message, timeout_s=SEND_S)

    def _connect(self, host: int, channel: Channel[HostMessage]) -> None:
        self._links[host] = channel
        self._read_from(host)

    def _read_from(self, host: int) -> None:
        channel = self._links[host]
        self._silence.heard(host)

        def read() -> None:
            try:
                while True:
                    message, _ = channel.receive()
                    channel.end_body()
                    self._silence.heard(host)
                    self._put(host, message)
            except PacelineError as error:
                if self._links.get(host) is channel:  # else that is known, and its host may be there again
                    self._put(host, HostLost(host=host, why=str(error)))

        threading.Thread(target=read, name=f"paceline-host-{host}", daemon=True).start()

    def _drop(self, host: int) -> None:
        self._late.outside.discard(host)
        if (channel := self._links.pop(host, None)) is not None:
            channel.close()

    def close(self) -> None:
        """End all connections: for those who still need this host it is gone."""
        self._door.close()
        self.leave()
        self._late.close()
        for _, message in self._take():
            if isinstance(message, Arrived):
                message.channel.close()
