"""How long the model will take for so many rows, judged by how long it has taken: a line through what was measured,
and how far off that line was.

Recent measurements count more, so that a machine that gets slower is noticed within some dozens of batches.
"""

from __future__ import annotations

FORGETTING = 0.95  # weight of everything before, with each new measurement


class ServiceTime:
    """seconds ≈ a + b · rows, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = self._off = 0.0

    @property
    def off_s(self) -> float:
        """Returns by how many seconds a batch is off its prediction, on average."""
        return self._off / self._weight if self._weight else 0.0

    def measured(self, rows: int, seconds: float) -> None:
        """Takes note of one batch."""
        self._weight = FORGETTING * self._weight + 1.0
        self._rows = FORGETTING * self._rows + rows
        self._seconds = FORGETTING * self._seconds + seconds
        self._rows_rows = FORGETTING * self._rows_rows + rows * rows
        self._rows_seconds = FORGETTING * self._rows_seconds + rows * seconds
        self._off = FORGETTING * self._off + abs(seconds - self.of(rows))

    def of(self, rows: int) -> float:
        """Returns the seconds that so many rows will take; 0 before the first measurement.

        >>> time = ServiceTime()
        >>> for rows in (1, 5, 9):
        ...     time.measured(rows, 0.010 + 0.001 * rows)
        >>> round(time.of(20), 6)
        0.03
        """
        if not self._weight:
            return 0.0
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows / self._weight - mean_rows**2
        if spread < 1e-6:
            return mean
        slope = max(0.0, (self._rows_seconds / self._weight - mean_rows * mean) / spread)
        return max(0.0, mean + slope * (rows - mean_rows))
