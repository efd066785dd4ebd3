"""Whether another process still runs, asked of the kernel: for those whom no supervisor tells."""

from __future__ import annotations

import contextlib
import os
import select


class Life:
    """True while the process runs; never of another one that got the same number later."""

    def __init__(self, process: int) -> None:
        try:
            self._descriptor: int | None = os.pidfd_open(process)
        except ProcessLookupError:  # it has ended already
            self._descriptor = None
            return
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def __bool__(self) -> bool:
        return self._descriptor is not None and not self._poll.poll(0)

    def __del__(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
