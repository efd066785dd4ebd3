"""Why a request got no answer, with the status that says so in HTTP: 4xx lies with the request, 5xx with the server."""

from __future__ import annotations

from paceline.errors import PacelineError

BAD, UNAUTHORIZED, FORBIDDEN, UNKNOWN, TOO_SLOW, TOO_LARGE = 400, 401, 403, 404, 408, 413
NOT_COMPUTED, REFUSED, HEAD_TOO_LARGE = 422, 429, 431
UNAVAILABLE, TOO_LATE = 503, 504


class RequestError(PacelineError):
    """One sentence for whoever has asked."""

    def __init__(self, status: int, sentence: str, retry_after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_after_s = status, retry_after_s


def bad(field: str, value: object, expected: str) -> RequestError:
    """Returns the error of a field that is wrong.

    >>> str(bad("shape of x", [2, -1], "give sizes from 0 up"))
    'shape of x is [2, -1]: give sizes from 0 up'
    """
    shown = repr(value)
    return RequestError(BAD, f"{field} is {shown if len(shown) <= 80 else shown[:77] + '…'}: {expected}")
