"""Requests to stop, as bytes in a pipe: one more descriptor for a selector."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """A descriptor from which the requests to stop can be read, one byte a signal."""
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup asks to outlive the terminal
        wanted.append(signal.SIGHUP)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in wanted}
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)
        os.close(reading)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Requests to stop wait until this is over: for something short that must not be left half done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def stop_is_interrupt() -> Iterator[None]:
    """A request to end is a Ctrl-C, however it comes: for a command that only waits for others."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # Ctrl-C too: a shell has its background jobs ignore it, and whoever sends it to one means it.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
