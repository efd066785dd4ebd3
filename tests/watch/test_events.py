"""Events on disk, stalls, and stacks."""

from __future__ import annotations

import faulthandler
import json
import math
import tempfile
import time
from pathlib import Path

from paceline.exchange.board import Board
from paceline.exchange.words import Phase, Word
from paceline.watch.events import AppendFile, EventLog, StallWatch, innermost_frames


def no_complaint(error: OSError) -> None:
    raise error


def test_each_event_is_one_line_of_json_that_any_reader_takes(tmp_path: Path) -> None:
    log = EventLog(AppendFile(tmp_path / "events.jsonl", no_complaint))
    log.write("died", replica=1, signal="SIGKILL", step=12)
    log.write("step", loss=math.nan, text="two\nlines")
    log.close()
    first, second = (json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines())
    assert abs(first.pop("time") - time.time()) < 10
    assert first == {"event": "died", "replica": 1, "signal": "SIGKILL", "step": 12}
    assert (second["loss"], second["text"]) == (None, "two\nlines")


def test_two_writers_of_one_log_do_not_overwrite_each_other(tmp_path: Path) -> None:
    first, second = (AppendFile(tmp_path / "replica-0.log", no_complaint) for _ in range(2))
    for number in range(3):
        first.write(b"a%d\n" % number)
        second.write(b"b%d\n" % number)
    first.close()
    second.close()
    assert (tmp_path / "replica-0.log").read_bytes() == b"a0\nb0\na1\nb1\na2\nb2\n"


def test_a_full_disk_does_not_fail_the_writer() -> None:
    complaints: list[OSError] = []
    file = AppendFile(Path("/dev/full"), complaints.append)
    file.write(b"more")
    file.close()
    file.write(b"after the end")
    assert [error.strerror for error in complaints] == ["No space left on device"]


def waiting_since(board: Board, row: int, seconds: float) -> None:
    board.enter(row, Phase.AWAITING_GRADIENTS)
    board.set(row, Word.SINCE_NS, time.monotonic_ns() - int(seconds * 1e9))


def test_a_stall_names_who_is_waited_for_and_is_told_again_only_when_it_has_doubled() -> None:
    board = Board.create(3, supervised=True)
    watch = StallWatch(30)
    board.enter(1, Phase.COMPUTING)
    board.enter(2, Phase.LOADING)
    board.set(2, Word.SINCE_NS, time.monotonic_ns() - int(100e9))
    waiting_since(board, 0, 29)
    assert watch.look(board, [0, 1, 2]) is None
    waiting_since(board, 0, 31)
    stall = watch.look(board, [0, 1, 2])
    assert stall is not None
    assert (stall.waiting, stall.busy) == ((0,), (2, 1)), "whoever has been at it longest comes first"
    assert watch.look(board, [0, 1, 2]) is None
    waiting_since(board, 0, 61)
    assert watch.look(board, [0, 1, 2]) is None
    waiting_since(board, 0, 63)
    assert watch.look(board, [0, 1, 2]) is not None


def test_a_stall_that_is_over_does_not_delay_news_of_the_next() -> None:
    board = Board.create(1, supervised=True)
    watch = StallWatch(30)
    waiting_since(board, 0, 500)
    assert watch.look(board, [0]) is not None
    waiting_since(board, 0, 1)
    assert watch.look(board, [0]) is None
    waiting_since(board, 0, 31)
    assert watch.look(board, [0]) is not None


def test_computing_for_long_is_no_stall() -> None:
    board = Board.create(1, supervised=True)
    board.enter(0, Phase.COMPUTING)
    board.set(0, Word.SINCE_NS, time.monotonic_ns() - int(500e9))
    assert StallWatch(30).look(board, [0]) is None


def test_the_innermost_frame_of_a_real_stack_dump_comes_first() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        frames = innermost_frames(file.read())
    assert frames[0].endswith("in test_the_innermost_frame_of_a_real_stack_dump_comes_first")
    assert frames[0].startswith(__file__)
