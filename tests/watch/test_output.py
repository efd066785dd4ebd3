"""Output that nobody reads yet is kept, in order, and not in memory; a pipe that refuses gets all the same."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
from pathlib import Path

import pytest

from paceline.watch.output import MOST_IN_MEMORY, Output


def read_slowly(descriptor: int, count: int, pause_s: float = 0.0) -> bytes:
    found = b""
    while len(found) < count and (data := os.read(descriptor, 1 << 20)):
        found += data
        time.sleep(pause_s)
    return found


def test_what_is_not_read_is_kept_in_order_and_beyond_some_megabytes_not_in_memory(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    output = Output(writing, tmp_path)
    sent, began = hashlib.sha256(), time.monotonic()
    pieces = [os.urandom(1 << 16) for _ in range(16)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(1600):  # 100 MB
        piece = number.to_bytes(4, "big") + pieces[number % 16]
        sent.update(piece)
        output.write(piece)
    assert time.monotonic() - began < 10, "nobody has waited for a reader"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 4 * MOST_IN_MEMORY
    assert os.listdir(tmp_path) == [], "the file has no name that could stay behind"
    assert not output.wait(0.01)
    total = 1600 * (4 + (1 << 16))
    received = hashlib.sha256()
    while total:
        data = os.read(reading, 1 << 20)
        received.update(data)
        total -= len(data)
    assert received.digest() == sent.digest()
    assert output.wait(5)
    output.write(b"again\n")
    assert os.read(reading, 100) == b"again\n"
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_pipe_that_says_it_is_full_gets_everything(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = Output(writing, tmp_path)
    sent = b"".join(b"line %d\n" % number for number in range(100_000))
    for start in range(0, len(sent), 10_000):
        output.write(sent[start : start + 10_000])
    assert read_slowly(reading, len(sent), pause_s=0.005) == sent
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_reader_that_has_gone_ends_the_wait_and_nothing_is_kept_for_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    output = Output(writing, tmp_path)
    output.write(b"x" * (2 * MOST_IN_MEMORY))
    threading.Timer(0.1, os.close, (reading,)).start()
    assert output.wait(5)
    output.write(b"more")
    assert output.waiting == 0
    os.close(writing)


@pytest.mark.parametrize("limit", [0, 1 << 16])
def test_where_no_file_can_be_written_memory_has_to_do(tmp_path: Path, limit: int) -> None:
    reading, writing = os.pipe()
    output = Output(writing, tmp_path / "missing" if not limit else tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        sent = b"".join(b"%d\n" % number for number in range(1_000_000))
        for start in range(0, len(sent), 1 << 18):
            output.write(sent[start : start + (1 << 18)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_slowly(reading, len(sent)) == sent
    for descriptor in (reading, writing):
        os.close(descriptor)
