"""The progress of a run, for a person: a live table on a terminal, a plain line every few seconds elsewhere.

Everything shown is read from the board, at most a few times a second, by the supervisor alone: the replicas spend
nothing on it, and two of them never draw over one another. What the shown replica prints passes through here too,
so that it appears above the table.

Paceline's own lines go to stderr; stdout is the script's.
"""

from __future__ import annotations

import collections
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from paceline.exchange.board import Board
from paceline.exchange.words import HostWord, Phase, Word
from paceline.watch.output import Outputs, OutputText

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_ROWS = 16  # beyond, the table says how the replicas are spread
WINDOW_S = 5.0  # speeds are means over this time
PLAIN_EVERY_S = 5.0
DRAW_EVERY_S = 0.25
MOST_FOUND = 4  # of the script's numbers in a line
DOING = 20  # letters of what a replica does
PROMPTS = (b"(Pdb) ", b"ipdb> ", b">>> ", b"... ")  # of a debugger that waits for its user
MOST_UNFINISHED = 1 << 16  # bytes of a line
OVERDRAWN = re.compile(r"\r+$|^.*\r(?=[^\r\n])", re.MULTILINE)  # all but the last state of a bar that draws over itself
# Escape sequences other than colours, and control characters other than tabs and ends of lines.
NOT_COLOUR = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])|[\0-\x08\x0b-\x1a\x1c-\x1f\x7f]"
)


# ── what there is to show ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ReplicaTimes:
    """One replica's latest step."""

    name: str  # its number; of a device of a cut replica, both numbers: 0/1
    phase: Phase
    compute_ms: float
    wait_ms: float
    update_ms: float

    @property
    def not_computing(self) -> float:
        total_ms = self.compute_ms + self.wait_ms + self.update_ms
        return (self.wait_ms + self.update_ms) / total_ms if total_ms else 0.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    total_steps: int = 0  # 0: unknown
    resumed_at: int = 0  # steps that an earlier run has made
    loss: float | None = None
    samples_per_s: float = 0.0  # 0: of a loop under pl.distribute nobody knows the samples, or the loss
    steps_per_s: float = 0.0
    left_s: float | None = None
    replicas: tuple[ReplicaTimes, ...] = ()
    samples: int = 0
    found: tuple[tuple[str, float], ...] = ()  # by the script, the latest of each name

    def __str__(self) -> str:
        """
        >>> str(Progress(step=120, total_steps=500, loss=0.412, samples_per_s=5210.3, left_s=32.4))
        'step 120/500  loss 0.412  5210 samples/s  ETA 0:32'
        >>> str(Progress(step=120, steps_per_s=25.04, found=(("accuracy", 0.9512),)))
        'step 120  25 steps/s  accuracy 0.9512'
        """
        words = [f"step {self.step}/{self.total_steps}" if self.total_steps else f"step {self.step}"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4g}")
        if self.samples_per_s:
            words.append(f"{_short(self.samples_per_s)} samples/s")
        elif self.steps_per_s:
            words.append(f"{_short(self.steps_per_s)} steps/s")
        if self.left_s is not None:
            words.append(f"ETA {clock(self.left_s)}")
        words += [f"{name} {value:.4g}" for name, value in self.found[-MOST_FOUND:]]
        return "  ".join(words)


class Meter:
    """Reads the board and remembers enough of the last seconds to know speeds."""

    def __init__(self) -> None:
        self._recent: collections.deque[tuple[float, int, int]] = collections.deque()
        self._began: tuple[float, int] | None = None  # time and samples just before training began
        self._last = (0.0, 0)

    def read(self, board: Board, rows: Sequence[int], first_rank: int = 0, devices: int = 1) -> Progress:
        """`rows` are those that take part or have done so until the end."""
        now = time.monotonic()
        furthest = max(rows, key=lambda row: board.get(row, Word.STEP), default=0)
        step = board.get(furthest, Word.STEP) if rows else 0
        seen = max((board.get(row, Word.SAMPLES_SEEN) for row in rows), default=0)
        resumed_at = board.host_get(HostWord.RESUMED_AT) if step else 0
        recent = self._recent
        if step == 0 or self._began is None or (resumed_at and recent[-1][1] == 0):
            self._began = (now, seen)  # of a run that goes on, samples may be counted from where the earlier one was
        self._last = (now, seen)
        if step == 0 or (recent and not resumed_at <= recent[-1][1] <= step):  # not yet begun, or begun anew
            recent.clear()
        recent.append((now, step, seen))
        while recent[0][0] < now - WINDOW_S and len(recent) > 2:
            recent.popleft()
        then, step_then, seen_then = recent[0]
        elapsed_s = now - then
        steps_per_s = (step - step_then) / elapsed_s if elapsed_s else 0.0
        total = board.host_get(HostWord.TOTAL_STEPS)
        return Progress(
            step=step,
            total_steps=total,
            resumed_at=resumed_at,
            loss=board.get_float(furthest, Word.MEAN_LOSS) if step and seen else None,
            samples_per_s=(seen - seen_then) / elapsed_s if elapsed_s else 0.0,
            steps_per_s=steps_per_s if not seen else 0.0,
            left_s=(total - step) / steps_per_s if total and steps_per_s and total >= step else None,
            replicas=tuple(_times(board, row, first_rank + row, devices) for row in rows),
            samples=seen,
        )

    @property
    def overall_samples_per_s(self) -> float:
        """Over the whole of the training, from before its first step to the last look."""
        if self._began is None:
            return 0.0
        (start, seen_at_start), (end, seen) = self._began, self._last
        return (seen - seen_at_start) / (end - start) if end > start else 0.0


def _times(board: Board, row: int, rank: int, devices: int) -> ReplicaTimes:
    name = str(rank) if devices == 1 else f"{rank // devices}/{rank % devices}"
    compute, wait, update = (board.get(row, word) / 1e6 for word in (Word.COMPUTE_NS, Word.WAIT_NS, Word.UPDATE_NS))
    return ReplicaTimes(name, Phase(board.get(row, Word.PHASE)), compute, wait, update)


def clock(seconds: float) -> str:
    """
    >>> clock(32), clock(3723)
    ('0:32', '1:02:03')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


# ── how it is shown ──────────────────────────────────────────────────────────────────────────────────────────


class Display(Protocol):
    """Where the supervisor speaks."""

    def say(self, line: str) -> None:
        """Something a user has to know."""

    def pass_on(self, data: bytes, *, error: bool) -> None:
        """What the shown replica has printed."""

    def end_line(self) -> None:
        """What comes next begins with a new line."""

    def show(self, progress: Progress) -> None:
        """The latest progress; may be called as often as one likes."""

    def close(self, *, wait: bool = True) -> None:
        """Nothing more will come; return when all of it has been read, or at once."""


class PlainDisplay:
    """Lines, for files, pipes and people who prefer them."""

    def __init__(self, spill_to: Path | None = None, *, progress: bool = True, every_s: float = PLAIN_EVERY_S) -> None:
        self._outputs = Outputs(spill_to)
        self._progress = progress
        self._every_s = every_s
        self._next_at = 0.0
        self._shown_step = 0

    def say(self, line: str) -> None:
        err = self._outputs.err
        err.write(b"\n" * err.mid_line + line.encode(errors="backslashreplace") + b"\n")

    def pass_on(self, data: bytes, *, error: bool) -> None:
        (self._outputs.err if error else self._outputs.out).write(data)

    def end_line(self) -> None:
        self._outputs.end_lines()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._outputs.busy:  # the script is not done with its line, or nobody reads: this can wait
            return
        if progress.step == 0:  # the first line waits until there is a speed to speak of
            self._next_at = now + min(1.0, self._every_s)
        if self._progress and progress.step != self._shown_step and now >= self._next_at:
            self._next_at = now + self._every_s
            self._shown_step = progress.step
            self.say(str(progress))

    def close(self, *, wait: bool = True) -> None:
        if self._outputs.err.mid_line:
            self._outputs.err.write(b"\n")
        if wait:
            self._outputs.close()


class LiveDisplay:
    """A table that stays in place on the terminal, below everything that is printed."""

    def __init__(self, title: str, spill_to: Path | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._outputs = Outputs(spill_to)
        self._console = Console(file=cast(TextIO, OutputText(self._outputs.err)), highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        self._next_at = 0.0
        self._unfinished = {False: b"", True: b""}
        self._prompting = False

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def pass_on(self, data: bytes, *, error: bool) -> None:
        if not error and not sys.stdout.isatty():
            self._outputs.out.write(data)
            return
        if self._prompting:
            self._prompting = False
            self._live.start()
        lines, newline, rest = (self._unfinished[error] + data).rpartition(b"\n")
        if len(rest) > MOST_UNFINISHED:
            lines, newline, rest = lines + newline + rest, b"\n", b""
        self._unfinished[error] = rest
        self._print(lines + newline)
        if self._unfinished[error].endswith(PROMPTS):  # the table makes room for what is typed
            self._prompting = True
            self._live.stop()
            self._outputs.err.write(self._unfinished[error])
            self._unfinished[error] = b""

    def end_line(self) -> None:
        for error, unfinished in list(self._unfinished.items()):
            if unfinished:
                self.pass_on(b"\n", error=error)
        self._outputs.end_lines()

    def _print(self, lines: bytes) -> None:
        """Put them above the table as they are, but for what would move the cursor: rich takes a second for what a
        script can print in a millisecond."""
        from rich.segment import Segment, Segments

        text = OVERDRAWN.sub("", lines.decode(errors="replace"))
        text = NOT_COLOUR.sub("", text) + "\x1b[0m" * ("\x1b" in text)
        if text:
            self._console.print(Segments([Segment(text)]), soft_wrap=True)

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next_at and not self._prompting and not self._outputs.behind:
            self._next_at = now + DRAW_EVERY_S
            self._live.update(draw(self._title, progress), refresh=True)

    def close(self, *, wait: bool = True) -> None:
        self._print(b"".join(line + b"\n" for line in self._unfinished.values() if line))
        self._live.stop()
        if wait:
            self._outputs.close()


def choose_display(title: str, spill_to: Path | None = None, *, plain: bool, quiet: bool) -> Display:
    """The live table if there is a terminal to draw on. `spill_to`: a folder, for output that nobody reads yet."""
    if quiet or plain or not sys.stderr.isatty():
        return PlainDisplay(spill_to, progress=not quiet)
    return LiveDisplay(title, spill_to)


def draw(title: str, progress: Progress) -> RenderableType:
    """The live table."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    head.add_column(no_wrap=True, overflow="ellipsis", max_width=20)
    cells: list[RenderableType] = [Text(title, style="bold")]
    if progress.total_steps:
        head.add_column(max_width=24)  # as much of it as there is room for
        cells.append(ProgressBar(total=progress.total_steps, completed=progress.step))
    head.add_column(no_wrap=True)
    head.add_row(*cells, str(progress) if progress.step else "starting")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    cut = any("/" in times.name for times in progress.replicas)
    table.add_column("replica/device" if cut else "replica", no_wrap=True)
    table.add_column("", min_width=DOING)
    for name in ("compute", "waits", "update", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    if len(progress.replicas) <= MOST_ROWS:
        for times in progress.replicas:
            table.add_row(times.name, *_cells(times))
    else:
        for cells_of_row in _folded(progress.replicas):
            table.add_row(*cells_of_row)
    return Group(head, table)


def _cells(times: ReplicaTimes) -> list[str]:
    columns = (times.compute_ms, times.wait_ms, times.update_ms)
    doing = times.phase.words.removeprefix("is ")
    return [doing, *(f"{value:.1f} ms" for value in columns), f"{times.not_computing:.0%}"]


def _folded(replicas: Sequence[ReplicaTimes]) -> list[list[str]]:
    """Many replicas in three rows: their median, the one that computes longest, the one that waits longest."""
    phases = collections.Counter(times.phase for times in replicas).most_common(2)
    doing = ", ".join(f"{count} {phase.words.removeprefix('is ')}" for phase, count in phases)
    middle = ReplicaTimes(
        name="",
        phase=phases[0][0],
        compute_ms=statistics.median(times.compute_ms for times in replicas),
        wait_ms=statistics.median(times.wait_ms for times in replicas),
        update_ms=statistics.median(times.update_ms for times in replicas),
    )
    slowest = max(replicas, key=lambda times: times.compute_ms)
    idlest = max(replicas, key=lambda times: times.not_computing)
    return [
        [f"{len(replicas)}, median", doing if len(doing) <= DOING else f"{doing[: DOING - 1]}…", *_cells(middle)[1:]],
        [f"{slowest.name}, slowest", *_cells(slowest)],
        [f"{idlest.name}, idlest", *_cells(idlest)],
    ]
