"""`pl.load`: a trained model answers single requests, cut over several devices.

    predictor = pl.load("model.safetensors", Net(), split=pl.Tiles(rows=2))
    scores = predictor(image)

The caller's process is device 0. The others are forked from it, so that they have the model without anybody having to
describe it; the parameters lie once, in shared memory. A device that fails in a request fails the request; one whose
process ends ends the predictor. The devices end with the caller, whatever happens to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from paceline import checkpoint
from paceline.deadlines import deadline, refuse_deadline, shortest
from paceline.errors import (
    DeadlineExceeded,
    ModelError,
    PacelineError,
    ReplicaDied,
    Stalled,
    StrategyError,
)
from paceline.exchange.board import Board
from paceline.exchange.life import Life
from paceline.exchange.mailboxes import BOX_BYTES
from paceline.exchange.words import HostWord
from paceline.forked import end_with_parent, fork_to_compute
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.memory.arena import Arena
from paceline.memory.heap import keep_memory
from paceline.optim.models import evaluating, own_state
from paceline.quantize.int8_file import check_same_tensors, fill_int8, is_int8
from paceline.serve.device import Device, RequestAbandoned, ServingPeers, described, send_request, work
from paceline.serve.request_status import RequestStatus, StatusWord
from paceline.split.cut import Example
from paceline.split.values import Split
from paceline.stoppable_calls import StoppableCalls, around

MOST_DEVICES_A_CORE = 4
LONGEST_END_S = 2.0  # that a device may take to end by itself
_ALIGN = 64
_C_LIBRARY = ctypes.CDLL(None, use_errno=True)


def load(
    path: str | os.PathLike[str] | None,
    model: nn.Module,
    *,
    split: Split | None = None,
    dims: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Predictor:
    """Returns a predictor with the tensors of the safetensors file at `path`; None: with those that `model` has.

    `split` says how the model is cut: `pl.Layout`, `pl.Stages`, `pl.Tiles` or `pl.Wavefront`; None: not at all. `dims`
    names dims of parameters for a layout, as in `Trainer`. A model that is cut is the predictor's from here on; one
    that is not is in eval mode during a request, and otherwise as it was. `timeout_s` is the longest that one device
    waits for another.

    Call it before anything else of the process computes in threads of its own: devices are forked.
    """
    if not timeout_s > 0:
        raise StrategyError("timeout_s", timeout_s, "give a number of seconds above 0")
    if split is not None and (split.parts_of_batch or 1) > 1:
        raise StrategyError(
            "split", split.words, "a predictor answers one request at a time, so give no axis to the batch"
        )
    cores = allowed_cores()
    if split is not None and split.devices > MOST_DEVICES_A_CORE * len(cores):
        raise StrategyError(
            "split", split.words, f"that needs {split.devices} devices and this machine has {len(cores)} cores"
        )
    if path is not None:
        _fill(model, path, cut=split is not None)
    return Predictor(model, split, dims or {}, timeout_s)


class Predictor:
    """Answers requests: `predictor(*args)` is `model(*args)`, in eval mode and without gradients.

    Threads may share it; requests are answered one after the other. Close it, or use it as a context manager, to end
    its devices before the process ends.
    """

    def __init__(self, model: nn.Module, split: Split | None, dims: Mapping[str, str], timeout_s: float) -> None:
        self.devices = split.devices if split is not None else 1
        self._model = model
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._ended: str | None = None  # why
        self._calls = StoppableCalls()
        self._others: _DeviceProcesses | None = None
        if split is None or self.devices == 1:
            return
        model.eval()
        _share_parameters(model)
        keep_memory()  # of the devices, of which this process is one
        cores = allowed_cores()
        self._shares = [share_of_cores(device, self.devices, cores) for device in range(self.devices)]
        board = Board.create(self.devices, supervised=False)
        board.host_set(HostWord.CORES, len(cores))
        boxes = Arena.create(self.devices**2 * BOX_BYTES, "the mailboxes of a predictor", sparse=True)
        self._status = RequestStatus()
        self._others = _DeviceProcesses(self.devices)

        def peers(rank: int) -> ServingPeers:
            return ServingPeers(boxes, board, self._status, rank, self.devices, timeout_s)

        def life(rank: int, bell: int) -> None:
            _use(self._shares[rank])
            mine = peers(rank)
            mine.lives = {0: Life(self._process)}
            work(Device(model, split, dims, mine, self._status), mine, self._status, bell)

        # The caller's own first: what a cut imports is imported once, and what is wrong with it comes up here.
        self._peers = peers(0)
        self._device = Device(model, split, dims, self._peers, self._status)
        for rank in range(1, self.devices):
            self._others.start(rank, life)
        self._peers.lives = self._others.lives
        boxes.close()
        os.close(board.descriptor)
        self._end = weakref.finalize(self, self._others.end)

    @property
    def whole_model(self) -> nn.Module | None:
        """The model, if it is not cut."""
        return self._model if self._others is None else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            if (others := self._others) is None:
                return self._calls.run("the model", lambda stopping: self._answer_alone(args, kwargs, stopping))
            if not self._status[StatusWord.PREPARED]:
                refuse_deadline("the first request, which cuts the model,", "make one before without a deadline")

            def ask(_: object) -> Any:
                self._check_alive()
                with _using(self._shares[0]):
                    return self._ask(others, (args, kwargs))

            return self._calls.run(self._late, ask, self._give_up)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits for the requests of other threads; of a deadline, what is left of it holds inside."""
        limit_s, began = shortest(), time.monotonic()
        if limit_s is None:
            with self._lock:
                yield
            return
        if not self._lock.acquire(timeout=limit_s):
            raise DeadlineExceeded("the request of another thread", limit_s, time.monotonic() - began - limit_s)
        try:
            with deadline(max(limit_s - (time.monotonic() - began), 1e-6)):
                yield
        finally:
            self._lock.release()

    def _answer_alone(self, args: Any, kwargs: Any, stopping: AbstractContextManager[Any]) -> Any:
        """Returns the answer of a model that is not cut."""
        self._check_alive()
        with torch.no_grad(), evaluating(self._model), around(self._model, stopping):
            return self._model(*args, **kwargs)

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise ReplicaDied(f"this predictor has ended ({self._ended}): load the model again")
        if os.getpid() != self._process:
            raise PacelineError("this predictor belongs to the process that loaded it: load the model in this one")

    def _late(self) -> str:
        """Returns who is late: the devices that the caller's own waits for, or else that one."""
        awaited = self._peers.awaited
        return f"device {', '.join(map(str, awaited))}" if awaited else "device 0"

    def _give_up(self) -> None:
        """Fails the request in hand, which ends every device's wait for another; what follows is as in any failure."""
        self._status.fail(self._status[StatusWord.REQUEST], 0, "it took longer than its caller allows")

    def _ask(self, others: _DeviceProcesses, call: Example) -> Any:
        """Returns the answer of the cut model, from all devices together."""
        peers, status = self._peers, self._status
        if peers.somebody_failed:  # after the last answer was complete
            self._recover(others, status.reason)
            self._check_alive()
        status[StatusWord.REQUEST] = peers.request = status[StatusWord.REQUEST] + 1
        others.ring()
        try:
            send_request(call, peers)
            return self._device.answer(call)
        except ReplicaDied as error:
            raise self._over(others, str(error)) from None
        except RequestAbandoned:
            reason = f"device {status[StatusWord.FAILED_AT]} failed: {status.reason}"
            self._recover(others, reason)
            raise PacelineError(reason) from None
        except BaseException as error:
            status.fail(peers.request, 0, described(error))
            self._recover(others, described(error))
            raise

    def _recover(self, others: _DeviceProcesses, reason: str) -> None:
        """Clears away a failed request, so that the next can be answered; ends the predictor if devices differ in
        where they are."""
        others.ring()
        try:
            self._peers.clear()
        except (ReplicaDied, Stalled) as error:
            raise self._over(others, str(error)) from None
        if {self._status[StatusWord.PREPARED + device] for device in range(self.devices)} not in ({0}, {1}):
            self._over(others, reason)  # the model could not be cut, or not everywhere

    def _over(self, others: _DeviceProcesses, reason: str) -> ReplicaDied:
        """Ends the predictor, and returns the error that says so."""
        self._ended = reason
        others.end()
        return ReplicaDied(f"{reason}; this predictor has ended: load the model again")

    def close(self) -> None:
        """Ends the other devices. Later requests are refused."""
        with self._lock:
            self._calls.settle()
            if self._ended is None:
                self._ended = "it was closed"
            if self._others is not None and os.getpid() == self._process:
                self._end()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _DeviceProcesses:
    """The processes of the other devices: forked from the caller's, woken by a byte in a pipe, ended with it."""

    def __init__(self, devices: int) -> None:
        self._caller = os.getpid()
        self._bells = [os.pipe2(os.O_CLOEXEC) for _ in range(1, devices)]  # its end, the caller's end
        self._processes: list[int] = []
        self.lives: dict[int, Life] = {}

    def start(self, rank: int, life: Any) -> None:
        """Forks the process of a device, which runs `life(rank, bell)` and ends with it."""
        main = threading.current_thread() is threading.main_thread()
        if process := fork_to_compute():
            self._processes.append(process)
            self.lives[rank] = Life(process)
            os.close(self._bells[rank - 1][0])
            os.set_blocking(self._bells[rank - 1][1], False)
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
            if main:  # else the kernel would mean the end of that thread
                end_with_parent(self._caller)
            for number, (theirs, callers) in enumerate(self._bells, 1):
                os.close(callers)
                if number > rank:
                    os.close(theirs)
            life(rank, self._bells[rank - 1][0])
            status = 0
        except ReplicaDied:
            pass  # the caller is no more, or will say which device it was
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def ring(self) -> None:
        """Wakes all devices."""
        for _, callers in self._bells:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it rings already; it has ended
                os.write(callers, b"!")

    def end(self) -> None:
        """Closes the bells, by which the devices end, and waits for that; kills those that take too long."""
        if os.getpid() != self._caller:  # in a process that the caller has forked
            return
        for _, callers in self._bells:
            os.close(callers)
        self._bells = []
        deadline = time.monotonic() + LONGEST_END_S
        for process, life in zip(self._processes, self.lives.values(), strict=True):
            while life and time.monotonic() < deadline:
                time.sleep(0.001)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if life:
                    os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        self._processes, self.lives = [], {}


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────


def _fill(model: nn.Module, path: str | os.PathLike[str], *, cut: bool) -> None:
    """Loads the file into the model; they must have the same tensors. Of one in int8, modules are replaced."""
    inner, (tensors, notes) = own_state(model), checkpoint.read_noted_model(path)
    if is_int8(notes):
        if cut:
            warnings.warn(f"{os.fspath(path)} is in int8, and a model that is cut computes in float", stacklevel=3)
        fill_int8(inner, os.fspath(path), tensors, notes, cut=cut)
        return
    check_same_tensors(os.fspath(path), inner.state_dict(), tensors)
    inner.load_state_dict(tensors)


def _share_parameters(model: nn.Module) -> None:
    """Moves the parameters into shared memory. Buffers stay every device's own: a forward may write them."""
    parameters = list(own_state(model).parameters())
    for parameter in parameters:
        if parameter.device.type != "cpu":
            raise ModelError("model", f"on {parameter.device}", "the devices of a predictor are cores, move it to cpu")
    sizes = [-(-parameter.nbytes // _ALIGN) * _ALIGN for parameter in parameters]
    arena, start = Arena.create(max(sum(sizes), _ALIGN), "the parameters of a predictor"), 0
    for parameter, size in zip(parameters, sizes, strict=True):
        shared = arena.view(start, parameter.dtype, parameter.shape)
        shared.copy_(parameter.data)
        parameter.data = shared
        start += size
    arena.close()


# ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────


def _use(cores: tuple[int, ...]) -> None:
    """Gives this process these cores and one thread: a process that was forked cannot have its parent's threads."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)


@contextlib.contextmanager
def _using(cores: tuple[int, ...]) -> Iterator[None]:
    """Uses these cores for the length of a request; otherwise the caller's process is as it was.

    One that runs on them already is not pinned: the other cores are busy with the other devices, so nobody moves it. To
    be moved to and fro between requests costs more than everything else on the way to the devices and back.
    """
    threads = torch.get_num_threads()
    before = None if _C_LIBRARY.sched_getcpu() in cores else os.sched_getaffinity(0)
    if before is not None:
        os.sched_setaffinity(0, cores)
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
        if threads != 1:
            torch.set_num_threads(threads)
