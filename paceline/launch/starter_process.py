"""`python -m paceline.launch.starter_process CHANNEL MODULES`: the starter, from inside (`starter.py` is outside).

It loads torch and what else replicas need, and forks one whenever it is asked to. It computes nothing: what is forked
from it can then have threads of its own.

A forked replica has torch, but its script is to find things as in a new Python. So torch is out of sight until the
script imports it. Should variables that torch looks at when it is loaded be others by then, the process begins once
more, as a new Python, whose torch will see them.

A process that has torch already, because many runs are forked from it (`run_template.py`), forks its starter.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import msgspec

from paceline.launch.cores import thread_variables
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.starter import MOST_MESSAGE, READY, READY_STARTER, ForkRequest, ReadyStarter, is_read_at_loading
from paceline.launch.with_parent import PARENT_VARIABLE, die_with_parent

TORCH = "torch"
_MOST_DESCRIPTORS = 16
_NAP_S = 0.0002


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    load(sys.argv[2].split(","))
    _serve(channel)


def load(modules: Sequence[str]) -> None:
    """Loads torch, and these."""
    load_compiler_late()
    rest_while_loading()
    for name in (TORCH, *modules):
        importlib.import_module(name)


def make_ready() -> None:
    """Has the run that this process is about to become find a starter, if torch here is what its own would be."""
    lines = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")  # as it was when torch was loaded
    loaded = dict(line.partition("=")[::2] for line in lines if line)
    if TORCH not in sys.modules or _but_threads(loaded) != _but_threads(os.environ):
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    if starter := _fork():
        theirs.close()
        ready = ReadyStarter(owner=owner, process=starter, channel=ours.detach())
        os.environ[READY_STARTER] = msgspec.json.encode(ready).decode()
        return
    os.setsid()
    os.environ[PARENT_VARIABLE] = str(owner)
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    _place_descriptors([nothing, nothing, nothing, theirs.detach()], [0, 1, 2, 3])
    _serve(socket.socket(fileno=3))
    sys.exit()


def _serve(channel: socket.socket) -> None:
    """Returns in a process that was forked, when it has done what it was to do; and when nobody asks any more."""
    channel.send(READY)
    forked = _fork_on_request(channel)
    if forked is not None:
        importlib.import_module(forked.module).begin()


def _fork_on_request(channel: socket.socket) -> ForkRequest | None:
    """Returns in every process that is forked, with what it is to do; and None when the supervisor closes its end."""
    while True:
        message, received, _, _ = socket.recv_fds(channel, MOST_MESSAGE, _MOST_DESCRIPTORS)
        if not message:
            return None
        request = msgspec.msgpack.decode(message, type=ForkRequest)
        number, told = os.pipe()
        if not (between := _fork()):
            between = os.getpid()
            if _fork():
                os._exit(0)
            channel.detach()
            os.setsid()  # before anybody knows its number, which is then its group's too
            os.write(told, str(os.getpid()).encode())
            while os.getppid() == between:  # until the supervisor has adopted it
                time.sleep(_NAP_S)
            _become(request, received)
            return request
        os.close(told)
        os.waitpid(between, 0)
        channel.send(os.read(number, 16))
        for descriptor in (number, *received):
            os.close(descriptor)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # OpenBLAS has a thread, and looks after it
        return os.fork()


def _become(request: ForkRequest, received: Sequence[int]) -> None:
    """Makes this process, just forked, the one that was asked for."""
    _place_descriptors(received, [0, 1, 2, *request.descriptors])
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = [request.module, *request.arguments]
    show_command([sys.executable, "-m", *sys.argv])
    seem_new(request)


def seem_new(request: ForkRequest) -> None:
    """Has this process, just forked, be as a new Python, to the script in its arguments if there is one."""
    torch = sys.modules[TORCH]
    torch.default_generator.seed()  # as those of a new process, which nobody has seeded; Python's own does so by itself
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if (threads := int(request.environment["OMP_NUM_THREADS"])) != torch.get_num_threads():
        torch.set_num_threads(threads)
    if request.arguments:
        sys.meta_path.insert(0, HiddenTorch(request))


def show_command(words: Sequence[str]) -> None:
    """Has `ps` show this command line, as far as there is room for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    shown = "\0".join(words).encode(errors="surrogateescape")[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _place_descriptors(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Has these descriptors have the wanted numbers, and closes all others."""
    above = max(*received, *wanted) + 1
    for at, descriptor in enumerate(received):
        os.dup2(descriptor, above + at)
    os.closerange(3, above)
    for at, number in enumerate(wanted):
        os.dup2(above + at, number)
        os.close(above + at)


class HiddenTorch(MetaPathFinder, Loader):
    """Has torch, which is loaded, imported by the script as if it were not."""

    def __init__(self, request: ForkRequest) -> None:
        self._request = request
        self._cores, self._folder = os.sched_getaffinity(0), os.getcwd()
        self._torch = sys.modules.pop(TORCH)
        self._spec = self._torch.__spec__

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TORCH:
            return None
        if _read_at_loading(os.environ) != _read_at_loading(self._request.environment):
            self._begin_again()
        sys.meta_path.remove(self)
        return ModuleSpec(TORCH, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._torch

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def _begin_again(self) -> None:
        for descriptor in self._request.descriptors:
            os.set_inheritable(descriptor, True)
        os.sched_setaffinity(0, self._cores)
        os.chdir(self._folder)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        command = [sys.executable, "-m", self._request.module, *self._request.arguments]
        os.execve(sys.executable, command, self._request.environment)


def _read_at_loading(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if is_read_at_loading(name)}


def _but_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the same but for how many threads torch has, which can be changed later."""
    return {name: value for name, value in _read_at_loading(environment).items() if name not in thread_variables(1)}


if __name__ == "__main__":
    main()
