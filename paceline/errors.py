"""Everything that can go wrong, as one tree.

    PacelineError
    ├── InvalidInput          a value given by the user: names the field, the value, what would be right
    │   ├── StrategyError     flags and strategies: replicas, wire, emulate …
    │   ├── ModelError        the model or its optimizer: differing replicas, unsupported optimizer …
    │   ├── DataError         the dataset or the batch size
    │   └── LossError         the loss or a metric: not a scalar, not finite, a count below 0
    ├── CheckpointError       a file that is missing, damaged, or of another run
    ├── ArenaError            shared memory: full, or of another shape
    ├── LaunchError           processes that could not be started or supervised
    ├── SecurityError         keys and tokens: missing, expired, of another CA or role; a stranger at the other end
    ├── ReplicaDied           a death that cannot be survived here, and why
    ├── Stalled               a wait that passed its deadline: who waits for whom
    └── DeadlineExceeded      a call that took longer than its caller allows: who was late, and by how much

Each message is one sentence a user can act on. `paceline run` prints the sentence alone for these, and the
traceback for everything else.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class PacelineError(Exception):
    """Base of every error Paceline raises on purpose."""


class InvalidInput(PacelineError):
    """A user's value is wrong.

    >>> str(InvalidInput("replicas", 0, "give a whole number from 1 up"))
    'replicas is 0: give a whole number from 1 up'
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(f"{field} is {value!r}: {expected}")


def nearest_first(wanted: str, known: Sequence[str]) -> list[str]:
    """`known`, with what `wanted` probably meant in front.

    >>> nearest_first("hiden", ["batch", "embed", "hidden"])
    ['hidden', 'batch', 'embed']
    """
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    return [*near, *(name for name in known if name not in near)]


class StrategyError(InvalidInput):
    """A flag or a strategy's field is wrong."""


class ModelError(InvalidInput):
    """The model or its optimizer cannot be trained this way."""


class DataError(InvalidInput):
    """The dataset or the batch size is wrong."""


class LossError(InvalidInput):
    """The loss function returned something that cannot be trained on."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, or of another run."""


class ArenaError(PacelineError):
    """Shared memory is full, or holds something else."""


class LaunchError(PacelineError):
    """Processes could not be started or supervised."""


class SecurityError(PacelineError):
    """Keys or a token are missing or wrong, or the other side's are."""


class ReplicaDied(PacelineError):
    """A replica's death that the run cannot survive."""


class Stalled(PacelineError):
    """A wait passed its deadline."""


class DeadlineExceeded(PacelineError):
    """A call was not done within the time that its caller allows, and was given up: nothing of it is left behind.

    >>> str(DeadlineExceeded("member 'c'", 0.3, 0.0021))
    "member 'c' was not done within 0.3 s, and was given up 0.002 s later: allow more time, or ask again"
    """

    def __init__(self, who: str, limit_s: float, late_s: float) -> None:
        self.who, self.limit_s, self.late_s = who, limit_s, late_s
        super().__init__(
            f"{who} was not done within {limit_s:.3g} s, and was given up {late_s:.3f} s later: "
            "allow more time, or ask again"
        )
