"""What goes wrong in a process group.

torch raises RuntimeError there, and programs catch that: so these are RuntimeErrors too.
"""

from __future__ import annotations

from paceline.errors import PacelineError, ReplicaDied, Stalled


class CallError(PacelineError, RuntimeError):
    """A call has arguments that cannot be, or that differ between the ranks; the group stays as it was."""


class RankLate(Stalled, RuntimeError):
    """A rank has not come within the time limit."""


class RankDied(ReplicaDied, RuntimeError):
    """The process of a rank has ended."""


class GroupBroken(PacelineError, RuntimeError):
    """A rank gave up in the middle of a collective: nobody can say what the others have got of it."""
