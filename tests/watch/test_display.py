"""What a person sees of a run."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.exchange.board import Board
from paceline.exchange.words import HostWord, Phase, Word
from paceline.watch.display import LiveDisplay, Meter, PlainDisplay, Progress, ReplicaTimes, choose_display, draw


def drawn(progress: Progress, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(draw("train.py", progress))
    return capture.get()


def times(replica: int, compute_ms: float = 60.0) -> ReplicaTimes:
    return ReplicaTimes(str(replica), Phase.COMPUTING, compute_ms, 30.0, 10.0)


def test_progress_is_read_from_the_rows_that_take_part() -> None:
    board = Board.create(3, supervised=True)
    board.host_set(HostWord.TOTAL_STEPS, 100)
    meter, began = Meter(), time.monotonic()
    assert meter.read(board, [0, 1, 2]).loss is None, "there is no loss before the first step"
    time.sleep(0.1)
    for row, loss in ((0, 0.25), (1, 0.5), (2, 99.0)):
        board.set_float(row, Word.MEAN_LOSS, loss)
        board.set(row, Word.STEP, 10)
        board.set(row, Word.SAMPLES_SEEN, 640)
    board.set(0, Word.COMPUTE_NS, 6_000_000)
    board.set(0, Word.WAIT_NS, 3_000_000)
    board.set(0, Word.UPDATE_NS, 1_000_000)
    board.enter(0, Phase.UPDATING)
    board.declare_ended(2)
    progress = meter.read(board, [0, 1], first_rank=4)
    lasted_s = time.monotonic() - began
    assert (progress.step, progress.total_steps, progress.loss) == (10, 100, 0.25)
    assert 640 / lasted_s <= progress.samples_per_s <= 640 / 0.1
    assert progress.left_s == pytest.approx(90 / 10 * 640 / progress.samples_per_s)
    assert progress.replicas[0] == ReplicaTimes("4", Phase.UPDATING, 6.0, 3.0, 1.0)
    assert progress.replicas[0].not_computing == pytest.approx(0.4)
    assert meter.overall_samples_per_s == pytest.approx(progress.samples_per_s, rel=0.01)


def test_samples_seen_before_a_resume_do_not_count_as_speed() -> None:
    board = Board.create(1, supervised=True)
    board.set(0, Word.SAMPLES_SEEN, 10**9)
    meter = Meter()
    meter.read(board, [0])
    time.sleep(0.05)
    board.set(0, Word.STEP, 1)
    board.set(0, Word.SAMPLES_SEEN, 10**9 + 64)
    meter.read(board, [0])
    assert 0 < meter.overall_samples_per_s <= 64 / 0.05


def test_a_resumed_run_counts_its_own_steps_alone() -> None:
    board = Board.create(2, supervised=True)
    board.host_set(HostWord.TOTAL_STEPS, 2000)
    meter = Meter()
    meter.read(board, [0, 1])
    for row in range(2):
        board.begin_step(row, 1000)
        board.set(row, Word.SAMPLES_SEEN, 64_000)
    assert meter.read(board, [0, 1]).left_s is None, "no step of its own yet"
    time.sleep(0.1)
    for row in range(2):
        board.begin_step(row, 1010)
        board.set(row, Word.SAMPLES_SEEN, 64_640)
    progress = meter.read(board, [0, 1])
    assert (progress.step, progress.resumed_at) == (1010, 1000)
    assert 0 < meter.overall_samples_per_s <= 640 / 0.1
    assert progress.left_s is not None
    assert progress.left_s >= 990 / 10 * 0.1


@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (4, 1), (16, 1), (64, 1), (4, 2), (16, 4), (64, 4)])
@pytest.mark.parametrize("phase", Phase)
def test_the_live_table_fits_eighty_columns(replicas: int, devices: int, phase: Phase) -> None:
    board = Board.create(replicas, supervised=True)
    board.host_set(HostWord.TOTAL_STEPS, 1_250_000)
    for row in range(replicas):
        board.set(row, Word.STEP, 1_000_000)
        board.set(row, Word.SAMPLES_SEEN, 1_000_000)
        board.set_float(row, Word.MEAN_LOSS, 0.01234)
        board.enter(row, phase)
        for word in (Word.COMPUTE_NS, Word.WAIT_NS, Word.UPDATE_NS):
            board.set(row, word, 12_345_600_000)
    progress = replace(Meter().read(board, range(replicas), devices=devices), samples_per_s=123_456.0, left_s=36_000.0)
    lines = drawn(progress, width=80).splitlines()
    assert len(lines) == 2 + (replicas if replicas <= 16 else 3), "a line for each replica, none of them wrapped"
    assert all("12345.6 ms  12345.6 ms  12345.6 ms   67%" in line for line in lines[2:])
    assert "step 1000000/1250000  loss 0.01234  123456 samples/s  ETA 10:00:00" in lines[0]
    if replicas <= 16:
        assert all(phase.words.removeprefix("is ") in line for line in lines[2:])


def test_a_run_that_starts_anew_does_not_go_backwards_in_speed() -> None:
    board = Board.create(1, supervised=True)
    meter = Meter()
    board.set(0, Word.STEP, 50)
    board.set(0, Word.SAMPLES_SEEN, 3200)
    meter.read(board, [0])
    progress = meter.read(Board.create(1, supervised=True), [0])
    assert progress.samples_per_s == 0


def test_the_plain_line_leaves_out_what_is_not_known() -> None:
    assert str(Progress(step=3)) == "step 3"
    assert str(Progress(step=3, loss=0.25, samples_per_s=12.34)) == "step 3  loss 0.25  12.3 samples/s"


def test_plain_progress_comes_now_and_then_and_never_into_the_scripts_line(capfd: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(every_s=0.0)
    display.pass_on(b"loading", error=False)
    display.show(Progress(step=1))
    display.pass_on(b" done\n", error=False)
    display.show(Progress(step=2))
    display.show(Progress(step=2))
    display.pass_on(b"half", error=True)
    display.say("paceline: replica 1 was killed")
    display.close()
    slow = PlainDisplay(every_s=60.0)
    for step in range(5, 100):
        slow.show(Progress(step=step))
    slow.close()
    assert capfd.readouterr() == (
        "loading done\n",
        "step 2\nhalf\npaceline: replica 1 was killed\nstep 5\n",
    )


def test_quiet_shows_no_progress_but_what_has_to_be_known(capfd: pytest.CaptureFixture[str]) -> None:
    display = choose_display("train.py", plain=False, quiet=True)
    display.show(Progress(step=1))
    display.say("paceline: replica 1 was killed")
    display.close()
    assert capfd.readouterr() == ("", "paceline: replica 1 was killed\n")


def test_the_live_table_has_a_row_for_each_replica() -> None:
    text = drawn(Progress(step=5, total_steps=10, loss=0.5, replicas=(times(0), times(1, 120.0))))
    assert "step 5/10  loss 0.5" in text
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert rows == [
        ["0", "computing", "60.0", "ms", "30.0", "ms", "10.0", "ms", "40%"],
        ["1", "computing", "120.0", "ms", "30.0", "ms", "10.0", "ms", "25%"],
    ]


def test_a_script_that_prints_much_is_shown_above_the_table_in_no_time(capfd: pytest.CaptureFixture[str]) -> None:
    display = LiveDisplay("train.py")
    began = time.monotonic()
    for _ in range(8):
        display.pass_on(b"short\n" * 8192, error=True)
    taken_s = time.monotonic() - began
    display.pass_on(b"10%\r20%\r\r\n\x1b[2K\x1b[1Aup \x1b[31mred\n\tmore", error=True)
    display.close()
    shown = capfd.readouterr().err
    assert taken_s < 1, "nobody listens to signals meanwhile"
    assert shown.count("short\n") == 8 * 8192
    assert "20%\nup \x1b[31mred\n\x1b[0m" in shown, "the last state of a bar; colours, but no cursor that moves"
    assert "\tmore\n" in shown


def test_many_replicas_are_folded_and_the_slowest_is_named() -> None:
    replicas = tuple(times(replica, 200.0 if replica == 17 else 60.0) for replica in range(64))
    lines = drawn(Progress(step=5, replicas=replicas)).splitlines()
    assert len(lines) == 5
    assert lines[2].split()[:2] == ["64,", "median"]
    assert lines[3].split()[:2] == ["17,", "slowest"]
    assert "200.0 ms" in lines[3]


def test_a_script_whose_name_looks_like_markup_is_shown_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(draw("[red]train[/red].py", Progress()))
    assert "[red]train[/red].py" in capture.get()
