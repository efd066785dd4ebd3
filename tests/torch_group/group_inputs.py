"""What the ranks of the cases put in, and the list of the cases.

All ranks know what every rank puts in, so each can work out for itself what must come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.exchange.mailboxes import ROOM_BYTES
from paceline.torch_group.rounds import SLOT_BYTES

TIMEOUT_S = 60.0
LONG = SLOT_BYTES // 4 + 12345  # elements of float32: two rounds at least, the last a short one
LARGE = ROOM_BYTES // 4 + 1000  # more than a mailbox holds
CASES: dict[str, Callable[[int, int], None]] = {}


def case(run: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[run.__name__] = run
    return run


@functools.lru_cache(64)
def drawn(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank puts in."""
    numbers = drawn(rank, shape).clone()
    return numbers.to(dtype) if dtype.is_floating_point or dtype.is_complex else (numbers * 100).to(dtype)


def numbered(first: int, length: int) -> torch.Tensor:
    return torch.arange(first, first + length, dtype=torch.float32)


def same(got: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, **tolerance)


def crooked(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * 2), 7.0).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@contextmanager
def one_sentence(kind: type[Exception], *words: str) -> Iterator[None]:
    """What runs inside raises `kind`, which is a RuntimeError as torch's own groups raise it, with these words."""
    with pytest.raises(kind) as raised:
        yield
    assert isinstance(raised.value, RuntimeError)
    assert all(word in str(raised.value) for word in words), raised.value
