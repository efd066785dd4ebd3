"""The shell's limit of a process's address space (`ulimit -v`), which shows itself in many ways and never by its name.

torch's libraries alone take hundreds of megabytes of it. What comes too late is a MemoryError, an import that fails, a
thread that cannot be started, or an abort deep in a library.
"""

from __future__ import annotations

import errno
import resource
import signal

# How Python, torch, the loader of libraries and C++ say it.
_WORDS = ("llocate memory", "failed to map segment", "start new thread", "bad_alloc", "emory allocation")
_ABORTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


def address_limit() -> str:
    """The limit as a part of a sentence; empty if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if limit == resource.RLIM_INFINITY else f"ulimit -v allows a process {limit >> 20} MiB of address space"


def behind(error: BaseException) -> str:
    """What an error that lacks memory does not say; empty for others, and where there is no limit."""
    lacks = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    return address_limit() if lacks or any(words in str(error) for words in _WORDS) else ""


def behind_end(code: int, last_errors: str = "") -> str:
    """What to add, in brackets, to the sentence about a process that ended with this code, or by minus this signal."""
    aborted = -code in _ABORTS or any(words in last_errors for words in _WORDS)
    limit = address_limit() if aborted else ""
    return f" ({limit})" if limit else ""
