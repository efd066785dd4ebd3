"""Worker processes for datasets whose `__getitem__` is slow Python: several samples are loaded at the same time.

    feed ── "samples 7, 31, 4 of epoch 2" ──▶ worker 0 ──▶ samples ─┐
         ── "samples 19, 2, 40"           ──▶ worker 1 ──▶ samples ─┴─▶ one batch, in order

The samples of *one* batch are divided, in small pieces to whoever is free, so that a batch is there sooner and the
result is the same with any number of workers. A `collate` of the user's own runs in a worker as well, on all samples of
the batch, which are handed on as they have come.

**Random numbers.** Before each sample torch's, numpy's and Python's generators are seeded from (seed, epoch, index of
the sample). So an augmentation is another one in each epoch, and the same whichever worker, of whichever replica,
makes it: also after a death or a resume. Before `collate` they are seeded from the first sample of the part.

Workers are forked, so they see the dataset as it is, need not import the script, and get nothing but indices. They end
with the process: at the end of its socket, or when the kernel says that it has died.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.data.collate import Collate
from paceline.data.samples_message import Message, pack, receive, send, unpack
from paceline.errors import DataError, PacelineError
from paceline.forked import end_with_parent, fork_to_compute
from paceline.seeds import mixed
from paceline.torch_private import be_worker

PIECES = 4  # that a worker gets of a batch: whoever is slow gets fewer
LONGEST_END_S = 1.0  # for a sample that nobody waits for
_COLLATING = 1 << 40  # in the place of a sample, for a seed

GetMany = Callable[[list[int]], list[Any]]


class _Request(msgspec.Struct, array_like=True):
    seed: int  # of the run and the epoch
    indices: list[int]
    collate: bool = False
    parts: list[int] = []  # of messages with samples that follow, to be collated


class _WorkerTraceback(Exception):
    """Where a sample failed, as its worker saw it: the cause of what is raised here."""


class Workers:
    """Processes that load samples of one dataset; `with` starts and ends them."""

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None,
        count: int,
        *,
        begin: Callable[[int], None] | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """`collate`: the user's own. `begin`: called in each worker with its number. `cores`: where they may run, if
        that is elsewhere than this process."""
        if not isinstance(count, int) or count < 0:
            raise DataError("workers", count, "give a whole number of processes from 0 up")
        self.count, self.collates = count, collate is not None
        self._dataset, self._collate, self._begin, self._cores = dataset, collate, begin, cores
        self._get_many: GetMany | None = getattr(dataset, "__getitems__", None)
        self._sockets: list[socket.socket] = []
        self._processes: list[int] = []

    def __enter__(self) -> Workers:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else what is in it would be printed by each of them
        for number in range(self.count):
            self._start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._sockets:
            connection.close()
        end = time.monotonic() + LONGEST_END_S
        for process in self._processes:
            while not _has_ended(process):
                if time.monotonic() > end:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    break
                time.sleep(0.001)
        self._sockets, self._processes = [], []

    def kill(self) -> None:
        """Ends them whatever they are at; whoever waits for one is told that it was killed."""
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    # ── here ─────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, seed: int, epoch: int, indices: Sequence[int]) -> Any:
        """Returns the samples of these indices; or the batch, if there is a `collate`."""
        if not self._processes:
            raise PacelineError("the workers of the dataset have ended: samples are loaded inside of trainer.batches")
        request = _Request(mixed(seed, epoch), list(indices), self.collates)
        try:
            if self.collates and self.count == 1:
                return unpack(self._ask(request, []))
            messages = self._fetch(request)
            if self.collates:
                return unpack(self._ask(request, messages))
            return [sample for message in messages for sample in unpack(message)]
        except _Failed as failed:
            raise failed.error from failed.cause
        except BaseException:
            self.__exit__()  # whatever is under way would be taken for the next answer
            raise

    def _fetch(self, request: _Request) -> list[Message]:
        """Returns what the workers have made of all pieces, in order."""
        most = self.count * (PIECES if self._get_many is None else 1)
        size = max(1, -(-len(request.indices) // most))
        starts = range(0, len(request.indices), size)
        waiting, found = deque(starts), dict[int, Message]()
        free, busy = list(range(self.count)), dict[int, int]()
        failed: dict[int, _Failed] = {}
        while busy or (waiting and not failed):
            while free and waiting and not failed:
                worker, start = free.pop(0), waiting.popleft()
                piece = request.indices[start : start + size]
                self._tell(worker, _Request(request.seed, piece), [])
                busy[worker] = start
            readable, _, _ = select.select([self._sockets[worker] for worker in busy], [], [])
            for worker in [worker for worker in busy if self._sockets[worker] in readable]:
                start = busy.pop(worker)
                free.append(worker)
                try:
                    found[start] = self._answer(worker, _Request(request.seed, request.indices[start : start + size]))
                except _Failed as error:
                    failed[start] = error
        if failed:
            raise failed[min(failed)]
        return [found[start] for start in starts]

    def _ask(self, request: _Request, messages: list[Message]) -> Message:
        """Returns the batch of these samples, as the first worker collates it."""
        request = msgspec.structs.replace(request, parts=list(map(len, messages)))
        self._tell(0, request, [part for message in messages for part in message])
        return self._answer(0, request)

    def _tell(self, worker: int, request: _Request, parts: Message) -> None:
        try:
            send(self._sockets[worker], [msgspec.msgpack.encode(request), *parts])
        except OSError:
            raise self._lost(worker, request) from None

    def _answer(self, worker: int, request: _Request) -> Message:
        try:
            kind, *parts = receive(self._sockets[worker])
        except (EOFError, OSError):
            raise self._lost(worker, request) from None
        if bytes(kind) == b"failed":
            raise _Failed.of(unpack(parts), f"{worker} of {self.count}")
        return parts

    def _lost(self, worker: int, request: _Request) -> PacelineError:
        end, code = time.monotonic() + LONGEST_END_S, None
        while code is None and time.monotonic() < end:
            time.sleep(0.001)
            pid, status = os.waitpid(self._processes[worker], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        if code is not None:
            self._processes.pop(worker)
        why = " (that is what happens where memory runs out)" if code == -signal.SIGKILL else ""
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return PacelineError(
            f"worker {worker} of the {self.count} of the dataset {how} while it loaded samples "
            f"{_words(request.indices)}{why}"
        )

    # ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, number: int) -> None:
        here, there = socket.socketpair()
        caller, main = os.getpid(), threading.current_thread() is threading.main_thread()
        if process := fork_to_compute():
            there.close()
            self._sockets.append(here)
            self._processes.append(process)
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if main:  # else the kernel would mean the end of that thread
                end_with_parent(caller)
            for connection in (*self._sockets, here):
                connection.close()
            self._work(number, there)
            status = 0
        except (EOFError, ConnectionError):
            status = 0  # the caller has no more to ask
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)

    def _work(self, number: int, connection: socket.socket) -> None:
        gc.freeze()  # what was there before is the caller's too, and stays shared as long as nobody touches it
        torch.set_num_threads(1)
        if self._cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cores)
        be_worker(number, self.count, number, self._dataset)
        failure: Message | None = None
        if self._begin is not None:
            try:
                self._begin(number)
            except BaseException as error:
                failure = _described(error, "")
        while True:
            packed, *parts = receive(connection)
            request = msgspec.msgpack.decode(packed, type=_Request)
            send(connection, failure or self._made(request, parts))

    def _made(self, request: _Request, parts: Message) -> Message:
        at = [""]
        try:
            samples = _lists(request.parts, parts) if request.parts else self._samples(request, at)
            if not request.collate:
                return [memoryview(b"made"), *pack(samples)]
            assert self._collate is not None
            at[0] = f"collate of samples {_words(request.indices)}"
            _seed(mixed(request.seed, _COLLATING, request.indices[0]))
            return [memoryview(b"made"), *pack(self._collate(samples))]
        except BaseException as error:
            return _described(error, at[0])

    def _samples(self, request: _Request, at: list[str]) -> list[Any]:
        """Returns them; while it has not, `at` says which one it is at."""
        if self._get_many is not None:
            at[0] = f"samples {_words(request.indices)}"
            _seed(mixed(request.seed, request.indices[0]))
            return many_samples(self._get_many, request.indices)
        samples = []
        for index in request.indices:
            at[0] = f"sample {index}"
            _seed(mixed(request.seed, index))
            samples.append(self._dataset[index])
        return samples


class _Failed(Exception):
    """What a worker has answered instead of samples."""

    def __init__(self, error: BaseException, cause: BaseException) -> None:
        self.error, self.cause = error, cause

    @classmethod
    def of(cls, answer: tuple[bytes | None, str, str, str], worker: str) -> _Failed:
        packed, sentence, at, text = answer
        error: BaseException = PacelineError(f"{at or 'a worker'} cannot be loaded: {sentence}")
        if packed is not None:
            with contextlib.suppress(Exception):  # a class whose constructor wants something else
                error = unpack([memoryview(packed)])
        if at:
            note(error, at)
        return cls(error, _WorkerTraceback(f"{at or 'its beginning'}, in worker {worker}\n{text}"))


def _described(error: BaseException, at: str) -> Message:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sentence = "".join(traceback.format_exception_only(type(error), error)).strip()
    packed = None
    with contextlib.suppress(Exception):
        (part,) = pack(error)
        packed = bytes(part)
    return [memoryview(b"failed"), *pack((packed, sentence, at, text))]


def note(error: BaseException, at: str) -> None:
    """Has the traceback of an error end with where in the dataset it was; Python 3.10 has no such notes."""
    if hasattr(error, "add_note"):
        error.add_note(f"({at} of the dataset)")


def many_samples(get_many: GetMany, indices: list[int]) -> list[Any]:
    """Returns what the dataset's `__getitems__` does, if it is as many."""
    samples = get_many(indices)
    if len(samples) != len(indices):
        raise DataError(
            "number of samples from the dataset's __getitems__",
            len(samples),
            f"return one for each of the {len(indices)} indices",
        )
    return samples


def _lists(counts: list[int], parts: Message) -> list[Any]:
    """Returns the samples of several messages, which have so many parts each."""
    samples: list[Any] = []
    for count in counts:
        samples.extend(unpack(parts[:count]))
        parts = parts[count:]
    return samples


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _words(indices: Sequence[int], most: int = 8) -> str:
    """Returns indices as they stand in a sentence, the first few of many.

    >>> _words([3, 1, 2], most=2)
    '3, 1 …'
    """
    return ", ".join(map(str, indices[:most])) + (" …" if len(indices) > most else "")


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] != 0
    except ChildProcessError:  # somebody else has waited for it
        return True
