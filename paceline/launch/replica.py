"""One replica process, from both sides.

Outside, `ReplicaProcess` is the supervisor's hand on it: starts it, reads what it prints, learns of its end within
a millisecond (a pidfd becomes readable), and ends it together with its process group; what has left that is the
guard's (`guard.py`).

Inside, `python -m paceline.launch.replica train.py …` runs before and after the user's script: it ties its life to
the supervisor's, takes its cores, and then runs the script as `python train.py …` would. What the script raises
goes, without our own frames, into the log and into a failure file, from which the supervisor shows the first.

The two sides meet in `PACELINE_PLACE`, `PACELINE_PARENT`, and the descriptor of the board.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.deadlines import hold_always
from paceline.errors import LaunchError, PacelineError
from paceline.exchange.board import called
from paceline.findings import Message, MessageReader
from paceline.launch import limits, script
from paceline.launch.cores import allowed_cores, share_of_cores, thread_variables
from paceline.launch.guard import Guard
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.script import run_script
from paceline.launch.starter import ColdStart, NewProcess
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent
from paceline.memory.heap import keep_memory
from paceline.run_place import PLACE_VARIABLE, Place, find_place
from paceline.watch.events import AppendFile
from paceline.watch.run_folder import Failure, log_name

LONGEST_EXIT_S = 5.0  # for threads and exit handlers of a script that has failed

_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 4096
# Frames that are not shown.
_OURS = (
    __file__,
    script.__file__,
    *(f"<frozen {name}>" for name in ("importlib._bootstrap", "importlib._bootstrap_external", "runpy")),
)


# ── outside: the supervisor's hand on a replica ──────────────────────────────────────────────────────────────


class RunProcess:
    """A running process of a run. Its process group is its own: signals of the terminal do not reach it."""

    def __init__(self, new: NewProcess, starter: ColdStart, guard: Guard) -> None:
        self._guard = guard
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), **new.environment}
        self.pid = starter.start(replace(new, environment=environment))
        guard.watch(self.pid)
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, number: signal.Signals) -> None:
        """To the process and everything it has spawned.

        Its process group is named by its pid, which nobody else can have before `reap`, and somebody may after.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """After its end: its exit code, or minus the signal that killed it."""
        _, status = os.waitpid(self.pid, 0)
        self._guard.forget(self.pid)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def starting(who: str) -> Iterator[None]:
    """Around whatever it takes to start that process."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{who} could not be started: {error.strerror}") from error


class ReplicaProcess(RunProcess):
    """A running replica."""

    def __init__(self, command: Sequence[str], place: Place, log: AppendFile, starter: ColdStart, guard: Guard) -> None:
        """`command`: what comes after `python`. The only process of a run may ask its user: it has our stdin."""
        self.findings, told = os.pipe()  # from it, and what it writes to
        os.set_blocking(self.findings, False)
        self._messages, self.told_all = MessageReader(), False
        place = msgspec.structs.replace(place, findings=told)
        environment = {
            PLACE_VARIABLE: msgspec.json.encode(place).decode(),
            **thread_variables(threads_of(place)),
            **_as_torchrun(place),
            **guard.mark(place.row),
        }
        self.row = place.row
        self.rank = place.rank
        self.started_at = time.monotonic()
        self._log = log
        self._unfinished = {True: b"", False: b""}  # lines, of stderr and of stdout, that are not in the log yet
        self._tail = b""
        with starting(called(self.rank, place.strategy.devices)), contextlib.ExitStack() as theirs:
            self.stdout, stdout = os.pipe()
            self.stderr, stderr = os.pipe()
            stdin = 0 if place.world == 1 and _is_open(0) else os.open(os.devnull, os.O_RDONLY)
            for descriptor in (told, stdout, stderr, *([stdin] if stdin else [])):
                theirs.callback(os.close, descriptor)
            others = [told] if place.board is None else [told, place.board]
            streams = [stdin, stdout, stderr]
            super().__init__(
                NewProcess("paceline.launch.replica", command, environment, streams, others), starter, guard
            )
        for descriptor in (self.stdout, self.stderr):
            os.set_blocking(descriptor, False)

    def read_findings(self) -> list[Message]:
        """What it has told since the last look."""
        messages: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.findings, _CHUNK_BYTES):
                messages += self._messages.read(data)
            self.told_all = True
        return messages

    @property
    def last_errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.decode(errors="replace")

    def read(self, descriptor: int) -> bytes | None:
        """What it printed since the last look, which is now in its log; None at the end of the stream."""
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self._write_lines(data, error=descriptor == self.stderr)
        if descriptor == self.stderr:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return data or None

    def _write_lines(self, data: bytes, *, error: bool) -> None:
        """Write whole lines into the log, in which the other stream and the replica itself write as well.

        What has no end yet waits for it, unless it is very long, or nothing comes any more.
        """
        text = self._unfinished[error] + data
        end = text.rfind(b"\n") + 1
        if not data or len(text) - end > _CHUNK_BYTES:
            end = len(text)
        self._log.write(text[:end])
        self._unfinished[error] = text[end:]

    def ask_for_stack(self) -> int | None:
        """Have it write its stack into its log; from which byte on. None if it is not set up to."""
        with contextlib.suppress(OSError):
            # Before its handler is in place, the signal would kill it.
            status = Path(f"/proc/{self.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            if caught >> (signal.SIGUSR1 - 1) & 1:
                end = self._log.path.stat().st_size
                os.kill(self.pid, signal.SIGUSR1)
                return end
        return None

    def stack_since(self, start: int) -> str:
        with contextlib.suppress(OSError), self._log.path.open("rb") as log:
            log.seek(start)
            return log.read(_CHUNK_BYTES).decode(errors="replace")
        return ""

    def reap(self) -> int:
        code = super().reap()
        for descriptor in (self.stdout, self.stderr, self.findings):
            os.close(descriptor)
        for error in self._unfinished:
            self._write_lines(b"", error=error)
        self._log.close()
        return code


def threads_of(place: Place) -> int:
    """How many threads torch has in that replica."""
    return len(share_of_cores(place.row, place.rows, allowed_cores()))


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _as_torchrun(place: Place) -> dict[str, str]:
    """The variables by which torchrun tells a process its place, for what scripts and torch itself make of them."""
    address, _, port = (place.master or "127.0.0.1:29500").rpartition(":")
    counts = {"RANK": place.rank, "WORLD_SIZE": place.world, "LOCAL_RANK": place.row, "LOCAL_WORLD_SIZE": place.rows}
    words = {name: str(count) for name, count in counts.items()}
    return {**words, "MASTER_ADDR": address.strip("[]"), "MASTER_PORT": port}


# ── inside: around the user's script ─────────────────────────────────────────────────────────────────────────


def main() -> None:
    """`python -m paceline.launch.replica train.py …`."""
    load_compiler_late()
    rest_while_loading()
    begin()


def begin() -> None:
    """Run a script as the replica that `PACELINE_PLACE` says, in a process that may have torch already."""
    die_with_parent()
    place = find_place()
    log = _open_log(place)
    _prepare(place, log)
    if place.operation_timeout_s is not None:
        hold_always(place.operation_timeout_s)
    try:
        run_script(place)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error, place, log)
        # Threads and exit handlers of a script that has failed may hang, and everybody else would wait.
        with contextlib.suppress(RuntimeError):  # it needs a thread, for which there may be no room
            faulthandler.dump_traceback_later(LONGEST_EXIT_S, exit=True, file=log)
        sys.exit(1)


def _open_log(place: Place) -> io.TextIOBase:
    """Where stacks and tracebacks go: past the pipe, so that the supervisor decides what is shown."""
    if place.run_folder is not None:
        with contextlib.suppress(OSError):
            return (Path(place.run_folder) / log_name(place.rank)).open(
                "a", buffering=1, encoding="utf-8", errors="backslashreplace"
            )
    assert isinstance(sys.stderr, io.TextIOBase)
    return sys.stderr


def _prepare(place: Place, log: io.TextIOBase) -> None:
    keep_memory()
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log)
    os.sched_setaffinity(0, share_of_cores(place.row, place.rows, allowed_cores()))
    for descriptor in (place.board, place.findings):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # into a pipe, yet somebody is looking


def _report(error: BaseException, place: Place, log: io.TextIOBase) -> None:
    failed_at = time.time()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    failure = Failure(
        time=failed_at,
        replica=place.rank,
        kind=type(error).__name__,
        sentence=_text(traceback.format_exception_only(type(error), error)).strip(),
        traceback=_text(traceback.format_exception(type(error), error, trace)).rstrip(),
        expected=isinstance(error, PacelineError),
    )
    if failure.expected:
        failure = msgspec.structs.replace(failure, sentence=_text([str(error)]))
    elif limit := limits.behind(error):
        failure = msgspec.structs.replace(failure, sentence=f"{failure.sentence}: {limit}, raise it", expected=True)
    try:
        print(failure.text, file=log)
        if place.run_folder is not None:
            failure.write(Path(place.run_folder))
    except OSError:  # a full disk: what the supervisor can read from the pipe has to do
        print(failure.text, file=sys.stderr)


def _text(pieces: Sequence[str]) -> str:
    """All as one text that any file takes: names of files, and so messages, may hold what is no letter."""
    return "".join(pieces).encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()
