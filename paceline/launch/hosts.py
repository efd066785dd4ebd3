"""Several hosts on one machine: one supervisor each, started and ended together."""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.ending import END_GRACE_S
from paceline.launch.regular_look import LOOK_EVERY_S
from paceline.launch.with_parent import PARENT_VARIABLE
from paceline.watch.target import NOT_REACHED


def supervise_hosts(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], signals: int, *, meet: bool = False
) -> int:
    """Run each host's own supervisor; the first exit code that is not 0, or 0.

    Hosts are emulated on this machine, so each gets its part of the cores. Requests to stop are passed on to all;
    when one host fails, the others end at once. If their supervisors `meet`, they know themselves what to do then, and
    the exit code is host 0's. `signals`: where requests to stop can be read, one byte each.
    """
    environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
    cores = allowed_cores()
    running: dict[int, subprocess.Popen[bytes]] = {}  # by pidfd
    first: subprocess.Popen[bytes] | None = None
    exit_code, interrupted, kill_at = 0, False, math.inf

    def pass_on(number: int) -> None:
        for process in running.values():
            process.send_signal(number)

    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        try:
            for host, command in enumerate(commands):
                os.sched_setaffinity(0, share_of_cores(host, len(commands), cores))  # is inherited
                process = subprocess.Popen(command, env=environment, start_new_session=True)
                pidfd = os.pidfd_open(process.pid)
                running[pidfd] = process
                first = process if first is None else first
                selector.register(pidfd, selectors.EVENT_READ)
            while running:
                for key, _ in selector.select(LOOK_EVERY_S):
                    if key.fd == signals:
                        interrupted = True
                        for number in os.read(signals, 64):
                            pass_on(number)
                        continue
                    selector.unregister(key.fd)
                    process = running.pop(key.fd)
                    code = process.wait()
                    os.close(key.fd)
                    if meet:
                        if process is first:
                            exit_code = code if code >= 0 else 128 - code
                    elif code and not exit_code:
                        exit_code = code if code > 0 else 128 - code
                        if not interrupted and code != NOT_REACHED:  # who was asked to stop may be saving
                            pass_on(signal.SIGQUIT)
                            kill_at = time.monotonic() + 2 * END_GRACE_S
                if time.monotonic() > kill_at:
                    pass_on(signal.SIGKILL)
        finally:
            os.sched_setaffinity(0, cores)
            for process in running.values():
                process.kill()
                process.wait()
    return exit_code
