"""A few images at a time, so that what is computed on the way stays in the cache, in memory that is there already.

A temporary as large as the batch would cost more in page faults than the arithmetic on it does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_BLOCK_BYTES = 1 << 21  # of float32


def image_blocks(x: torch.Tensor) -> Iterator[slice]:
    """Yields which samples of a batch make up each block."""
    count = x.size(0)
    images = max(1, _BLOCK_BYTES // max(1, 4 * x.numel() // max(1, count)))
    for start in range(0, count, images):
        yield slice(start, start + images)
