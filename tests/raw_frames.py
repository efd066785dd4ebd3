"""Frames made by hand, byte by byte: what somebody sends who does not use our code."""

from __future__ import annotations

import struct

import xxhash

PRELUDE = struct.Struct("<3sBIQQ")
PROTOCOL = 3


def prelude(header_bytes: int, body_bytes: int, *, header_sum: int = 0, version: int = PROTOCOL) -> bytes:
    """The beginning of a frame, which announces so many bytes."""
    made = PRELUDE.pack(b"PLN", version, header_bytes, body_bytes, header_sum)
    return made + struct.pack("<Q", xxhash.xxh3_64_intdigest(made))


def raw_frame(header: bytes, body: bytes = b"", *, version: int = PROTOCOL) -> bytes:
    begin = prelude(len(header), len(body), header_sum=xxhash.xxh3_64_intdigest(header), version=version)
    return begin + header + body + (struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) if body else b"")
