"""`python -m paceline.cli.run_template_process CHANNEL`: the template of runs, from inside (`launch/run_template.py`).

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

import msgspec

from paceline.cli import main
from paceline.launch.run_template import MOST_MESSAGE, RunRequest
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent
from paceline.machine import installed_version
from paceline.plan.calibration import fingerprint

LOADED = ("paceline.cli.run", "paceline.launch.supervisor")  # what every run needs


def load() -> None:
    """Loads what every run needs, and has it looked up what every run looks up."""
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

    def serve(self) -> bool:
        """Returns whether this process was just forked, and is to run what stands in its arguments; else at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._channel:
                    self._tell_end(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._channel, MOST_MESSAGE, 1)
                if not message:
                    return False
                if self._fork(message, descriptors[0]):
                    return True

    def _fork(self, message: bytes, output: int) -> bool:
        request, template = msgspec.json.decode(message, type=RunRequest), os.getpid()
        told, code = os.pipe()
        if not (process := os.fork()):
            os.setsid()
            for stream in (sys.stdout, sys.stderr):
                os.dup2(output, stream.fileno())
            for descriptor in (output, told, code, *self._codes, *(pipe for _, pipe in self._codes.values())):
                os.close(descriptor)
            self._selector.close()
            self._channel.close()
            os.environ.update(request.environment, **{PARENT_VARIABLE: str(template)})
            sys.argv = ["paceline", *request.arguments]
            if request.cores:
                os.sched_setaffinity(0, request.cores)
            return True
        pidfd = os.pidfd_open(process)
        os.close(output)
        with contextlib.suppress(OSError):  # the owner is gone
            socket.send_fds(self._channel, [b"!"], [pidfd, told])
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


if __name__ == "__main__":
    die_with_parent()
    load()
    is_run = RunForks(socket.socket(fileno=int(sys.argv[1]))).serve()
    sys.exit(main() if is_run else 0)
