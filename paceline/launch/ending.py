"""How a run ends: with which exit code, because of what, and how long the rest of it may take.

    asked to stop    replicas end after the step they are at, and may save before; killed after STOP_GRACE_S
    ended            one has failed, or a host is lost: the others get a SIGTERM; killed after END_GRACE_S
    ended at once    a second signal, or SIGQUIT: killed now

The first reason is the run's. But a failure is never hidden: one that comes after a mere request to stop, or that was
on its way here when the end was heard of elsewhere, takes the place of that.
"""

from __future__ import annotations

import math
import time

STOP_GRACE_S = 30.0  # after a request to stop
END_GRACE_S = 5.0  # after SIGTERM


class RunEnding:
    """The end of a run, as far as it has come."""

    def __init__(self) -> None:
        self.exit_code: int | None = None  # known once the run is ending
        self.stopping = False  # asked to stop, and nothing worse has happened since
        self.stopped_by: str | None = None
        self.last_death = 0  # the signal that has killed a replica
        self._failure_to_come = False
        self._heard_elsewhere: str | None = None  # the signal of which another host has told, and that comes here too
        self._kill_at = math.inf

    @property
    def begun(self) -> bool:
        """Whether the run is ending."""
        return self.exit_code is not None

    def code(self, *, good: bool) -> int:
        """Returns the exit code of this host; `good`: a replica came to the end of its script."""
        if self.exit_code is not None:
            return self.exit_code
        return 0 if good else 128 + self.last_death

    @property
    def takes_failures(self) -> bool:
        """Whether a replica that fails now is a reason to end, and not one that fails because the run ends."""
        return not self.begun or self.stopping or self._failure_to_come

    @property
    def is_past_grace(self) -> bool:
        """Whether what still runs is to be killed."""
        return time.monotonic() >= self._kill_at

    def stop(self, exit_code: int, by: str, *, elsewhere: bool = False) -> None:
        """Notes that replicas are asked to stop; `elsewhere`: another host was told to, or noticed first."""
        self.exit_code, self.stopping, self.stopped_by = exit_code, True, by
        self._heard_elsewhere = by if elsewhere else self._heard_elsewhere
        self._kill_at = time.monotonic() + STOP_GRACE_S

    def end(self, exit_code: int, *, failure_to_come: bool = False) -> None:
        """Notes that replicas are told to end. `failure_to_come`: a replica here has failed, and not ended so far."""
        self.exit_code, self.stopping, self._failure_to_come = exit_code, False, failure_to_come
        self._kill_at = time.monotonic() + END_GRACE_S

    def end_at_once(self, exit_code: int) -> None:
        """Notes that replicas are killed now. If nothing was wrong before, another host may have failed because of a
        replica here that takes longer to end: that is told of then."""
        self._failure_to_come |= not self.begun
        self.exit_code = self.exit_code or exit_code
        self._kill_at = time.monotonic()

    def is_echo(self, signal: str) -> bool:
        """Whether this is the Ctrl-C of which another host has heard, and told, sooner. It is so once."""
        if signal != self._heard_elsewhere:
            return False
        self._heard_elsewhere = None
        return True
