"""What replicas have spawned is ended with them, wherever it has gone.

A replica's process group ends with it; whoever has left that (`setsid`, a daemon) is found in two other ways. The
supervisor adopts the orphans of everything below it (PR_SET_CHILD_SUBREAPER), so that they are its children at the
latest when the replica has ended. And what a replica starts inherits its environment, in which there is a mark of this
run and of its row.

`kill -9` of the supervisor ends the replicas (PR_SET_PDEATHSIG), but not what they had spawned: that is done by a tiny
process, which learns of the death by the end of the pipe on which it is told the groups. It is started from this file
alone, and so imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import struct
import subprocess
import sys
import time

RUN_VARIABLE = "PACELINE_RUN"  # which supervisor's a process is, and of which row
LONGEST_END_S = 2.0  # for what was killed to be gone

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_GROUP = struct.Struct("=q")


class Guard:
    """The supervisor's hand on what is below it, with the process that does its work if it cannot."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._not_ours = _children()  # of whatever has become this process
        self._adopted_before = ctypes.c_int(0)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._adopted_before), 0, 0, 0)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._run],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._groups = {self._process.pid}

    def mark(self, row: int | str) -> dict[str, str]:
        """What has to be in the environment of the replica in this row."""
        return {RUN_VARIABLE: f"{self._run}/{row}"}

    def watch(self, group: int) -> None:
        self._not_ours.discard(group)
        self._groups.add(group)
        self._tell(group)

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._tell(-group)

    def reap_adopted(self) -> None:
        """Take note of the end of orphans that have become children of this process, as init would."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, how)) and ended.si_pid not in self._groups | self._not_ours:
                os.waitpid(ended.si_pid, 0)

    def end_children_of(self, row: int) -> None:
        """End what the replica in this row, which has ended, has left behind."""
        self._end_adopted(f"{self._run}/{row}")

    def close(self) -> None:
        """End what all replicas have left behind. If this process had children before, only what has our mark."""
        self._end_adopted(f"{self._run}/" if self._not_ours else "")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()  # nothing is left to do for it, and it may not even have begun
        self._process.wait()
        self._prctl(_PR_SET_CHILD_SUBREAPER, self._adopted_before.value, 0, 0, 0)

    def _end_adopted(self, mark: str) -> None:
        end = time.monotonic() + LONGEST_END_S
        # Whoever has children of its own leaves them to us when it ends.
        while left := [pid for pid in _children() - self._groups - self._not_ours if _is_marked(pid, mark)]:
            for pid in left:
                _kill(pid)
            self.reap_adopted()
            if time.monotonic() > end:
                return
            time.sleep(0.001)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard: its help is lost, the run is not
            self._process.stdin.write(_GROUP.pack(number))


def _children() -> set[int]:
    """The children of this process, whichever of its threads has them."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def _is_marked(pid: int, mark: str) -> bool:
    """Whether that process was started with this mark, or one that begins with it if it ends in a slash."""
    if not mark:
        return True
    end = b"" if mark.endswith("/") else b"\0"
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0%s=%s%s" % (RUN_VARIABLE.encode(), mark.encode(), end) in b"\0" + file.read() + b"\0"
    except OSError:  # it has ended, or is another user's
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _main(run: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    while told := os.read(0, _GROUP.size * 512):
        for (number,) in _GROUP.iter_unpack(told):
            (groups.add if number > 0 else groups.discard)(abs(number))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + LONGEST_END_S
    while groups and time.monotonic() < end:  # those that are left when it ends in good order are none
        left = [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_marked(int(name), f"{run}/")]
        if not left:
            break
        for pid in left:
            _kill(pid)


if __name__ == "__main__":
    _main(sys.argv[1])
