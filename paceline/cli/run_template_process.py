"""`python -m paceline.cli.run_template_process CHANNEL MODULES`: the template of runs, from inside.

`launch/run_template.py` is outside.

It has one thread and opens nothing, so that a process which is forked from it is as good as new. It alone can wait for
what it has forked, so it tells the owner with which code each has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import platform
import selectors
import socket
import sys
from collections.abc import Sequence

import msgspec

from paceline.cli import main
from paceline.launch import starter_process
from paceline.launch.run_template import MOST_MESSAGE, RunRequest
from paceline.launch.starter import ForkRequest
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent
from paceline.machine import installed_version
from paceline.plan.calibration import fingerprint

LOADED = ("paceline.cli.run", "paceline.launch.supervisor")  # what every run needs


def load(modules: Sequence[str]) -> None:
    """Loads what every run needs, and has it looked up what every run looks up; `modules`: what replicas need."""
    if modules:
        starter_process.load(modules)
    for name in LOADED:
        importlib.import_module(name)
    fingerprint()
    platform.platform()
    for package in ("paceline", "torch"):
        installed_version(package)
    gc.freeze()  # what is there stays in memory that all share


class RunForks:
    """Forks runs as they are asked for, and waits for them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._codes: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and the pipe for its exit code

    def serve(self) -> RunRequest | None:
        """Returns in every process that is forked, with what it is to do; and None when there is no owner any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._channel:
                    self._tell_end(key.fd)
                    continue
                message, streams, _, _ = socket.recv_fds(self._channel, MOST_MESSAGE, 3)
                if not message:
                    return None
                request = msgspec.json.decode(message, type=RunRequest)
                if self._fork(request, streams):
                    return request

    def _fork(self, request: RunRequest, streams: Sequence[int]) -> bool:
        template = os.getpid()
        told, code = os.pipe()
        if not (process := os.fork()):
            os.setsid()
            for number, descriptor in enumerate(streams):
                os.dup2(descriptor, number)
            for descriptor in (*streams, told, code, *self._codes, *(pipe for _, pipe in self._codes.values())):
                os.close(descriptor)
            self._selector.close()
            self._channel.close()
            os.chdir(request.folder)
            for name, value in request.environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            os.environ[PARENT_VARIABLE] = str(template)
            if request.cores:
                os.sched_setaffinity(0, request.cores)
            return True
        pidfd = os.pidfd_open(process)
        for descriptor in streams:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # the owner is gone
            socket.send_fds(self._channel, [str(process).encode()], [pidfd, told])
        os.close(told)
        self._codes[pidfd] = process, code
        self._selector.register(pidfd, selectors.EVENT_READ)
        return False

    def _tell_end(self, pidfd: int) -> None:
        process, code = self._codes.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):  # nobody wants to know
            os.write(code, str(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])).encode())
        os.close(code)


def become(request: RunRequest) -> int:
    """Does what is asked for in this process, just forked; returns its exit code."""
    if request.module:
        sys.argv = [request.module, *request.arguments]
        starter_process.show_command([sys.executable, "-m", *sys.argv])
        die_with_parent()
        environment = dict(os.environ)
        starter_process.seem_new(
            ForkRequest(module=request.module, arguments=request.arguments, environment=environment, descriptors=[])
        )
        importlib.import_module(request.module).begin()
        return 0
    sys.argv = ["paceline", *request.arguments]
    starter_process.show_command(sys.argv)
    starter_process.make_ready()
    code = main()
    if starter_process.TORCH in sys.modules:  # which Python would take to pieces
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    die_with_parent()
    load([name for name in sys.argv[2].split(",") if name])
    wanted = RunForks(socket.socket(fileno=int(sys.argv[1]))).serve()
    sys.exit(0 if wanted is None else become(wanted))
