"""What an engine starts on each host: `python -m paceline.engines.agent HOST`.

It says where it is, waits until it is told what to run, runs that as a user at this machine would, and passes on what
is printed. Its lifeline is its stdin: when that ends, the driver or the engine's own process is gone, and nothing may
keep running here, so the run is told to end at once. The run in turn dies with the agent, and everything else with the
run.

HOST is this host's number, or the variable in which the engine has put it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import pty
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import msgspec

from paceline.engines.line_reader import LineReader
from paceline.engines.messages import (
    FROM_DRIVER,
    MOST_PRINTED_BYTES,
    AgentReady,
    FromAgent,
    FromDriver,
    HostBegins,
    HostEnded,
    HostPrinted,
    HostRefused,
    HostSignal,
    line_of,
)
from paceline.launch.outcome import LINK_VARIABLE
from paceline.launch.with_parent import PARENT_VARIABLE
from paceline.net.secure import write_secret
from paceline.watch.output import write_all

ADDRESS_VARIABLE = "PACELINE_NODE_ADDRESS"  # under which the engine's other nodes reach this one, where it knows that
GIVE_UP_AFTER_S = 10.0  # of a run that was told to end at once
SAME_EVERYWHERE = ("paceline", "torch")
_STDIN, _STDOUT = 0, 1
_SIOCGIFADDR = 0x8915


class Agent:
    """One host's agent."""

    def __init__(self, host: int) -> None:
        self._host = host
        self._lines = LineReader()
        self._selector = selectors.DefaultSelector()
        self._selector.register(_STDIN, selectors.EVENT_READ)
        self._run: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, bool] = {}  # what can be read of the run, and whether it is its stderr
        self._kill_at: float | None = None

    def work(self) -> None:
        """Until the run has ended, or there is nobody to run it for."""
        self._address = own_address()
        versions = {name: importlib.metadata.version(name) for name in SAME_EVERYWHERE}
        self._tell(
            AgentReady(
                host=self._host,
                node=node_name(),
                address=self._address,
                port=free_port(),
                versions=versions,
            )
        )
        with tempfile.TemporaryDirectory(prefix="paceline-") as self._own_folder:
            while self._run is None or self._streams or self._run.poll() is None:
                for key, _ in self._selector.select(0.5):
                    if key.fd == _STDIN:
                        self._hear()
                    else:
                        self._pass_on(key.fd)
                if self._run is None and _STDIN not in self._selector.get_map():
                    return
                if self._run is not None and self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._run.kill()
            self._tell(HostEnded(host=self._host, code=self._run.wait()))

    def _hear(self) -> None:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            self._lost()
        for line in self._lines.read(data):
            message: FromDriver = FROM_DRIVER.decode(line)
            if message.host != self._host:
                continue
            if isinstance(message, HostBegins) and self._run is None:
                try:
                    self._start(message)
                except OSError as error:
                    what = f"{error.filename or message.arguments[0]} ({error.strerror})"
                    self._tell(HostRefused(host=self._host, sentence=f"{node_name()} has no {what}"))
            elif isinstance(message, HostSignal) and self._run is not None:
                self._run.send_signal(message.number)

    def _lost(self) -> None:
        """Nobody is there any more for whom this runs."""
        if _STDIN in self._selector.get_map():
            self._selector.unregister(_STDIN)
        if self._run is not None and self._kill_at is None:
            self._run.send_signal(signal.SIGQUIT)
            self._kill_at = time.monotonic() + GIVE_UP_AFTER_S

    def _start(self, begins: HostBegins) -> None:
        if begins.folder is not None:
            os.chdir(begins.folder)
        command, *arguments = begins.arguments
        if begins.token is not None:
            path = Path(self._own_folder) / "token"
            write_secret(path, begins.token.encode())
            arguments = ["--token", str(path), *arguments]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        if (link := link_of(self._address)) is not None:
            environment.setdefault(LINK_VARIABLE, link)
        out, err, ours = _streams(begins)
        self._run = subprocess.Popen(
            [sys.executable, "-m", "paceline", command, *arguments],
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        os.close(out)
        os.close(err)
        for descriptor, error in ours.items():
            self._streams[descriptor] = error
            self._selector.register(descriptor, selectors.EVENT_READ)

    def _pass_on(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, MOST_PRINTED_BYTES)
        except OSError:  # so a terminal ends
            data = b""
        if data:
            self._tell(HostPrinted(host=self._host, data=data, error=self._streams[descriptor]))
            return
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._streams[descriptor]

    def _tell(self, message: FromAgent) -> None:
        try:
            write_all(_STDOUT, line_of(message))
        except OSError:
            self._lost()


def _streams(begins: HostBegins) -> tuple[int, int, dict[int, bool]]:
    """The run's stdout and stderr, and where they are read here, with which of them is stderr.

    On a terminal a run draws its table. If the user looks at one, the run has one too, of the same size.
    """
    out_read, out = os.pipe()
    if begins.terminal is None:
        err_read, err = os.pipe()
        return out, err, {out_read: False, err_read: True}
    err_read, err = pty.openpty()
    columns, lines = begins.terminal
    fcntl.ioctl(err, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    settings = termios.tcgetattr(err)
    settings[1] &= ~termios.OPOST  # the user's own terminal ends lines in its way
    termios.tcsetattr(err, termios.TCSANOW, settings)
    if begins.all_there:  # one stream, so that the order stays
        os.close(out_read)
        os.close(out)
        return os.dup(err), err, {err_read: True}
    return out, err, {out_read: False, err_read: True}


def node_name() -> str:
    """What the engine calls this machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address() -> str:
    """An address of this machine that the other hosts reach."""
    if (told := os.environ.get(ADDRESS_VARIABLE)) is not None:
        return told
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel says from which address it would.
        probe.connect((os.environ["SLURM_LAUNCH_NODE_IPADDR"], 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def link_of(address: str) -> str | None:
    """The network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def free_port() -> int:
    """A port that nobody uses at this moment, with another free one after it: scripts may meet there by themselves."""
    while True:
        with socket.create_server(("", 0)) as server:
            port: int = server.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
                return port


def main() -> None:
    (given,) = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # threads of Ray's block what our own processes wait for
    for number in (signal.SIGINT, signal.SIGHUP):  # what an engine sends to all of a node: the driver tells us itself
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(msgspec.DecodeError):
        Agent(int(given) if given.isdigit() else int(os.environ[given])).work()


if __name__ == "__main__":
    main()
