"""What is left of a run: `benchmarks.json` with every round, `benchmarks.md` with the figures, `benchmarks.png`.

The JSON file is the record; page and plot are made from it. A run of some benchmarks replaces those and keeps the
others, if they are of the same machine: figures of two machines on one page would be compared. Of the page, only what
stands between the two markers is written; the rest belongs to whoever writes the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from benchmarks.machine import Machine
from benchmarks.measure import Claim, Result
from paceline.errors import InvalidInput

BEGIN = "<!-- figures: begin (written by `make bench`, edit outside) -->"
END = "<!-- figures: end -->"
_PAGE = f"""\
# Benchmarks

Paceline beside its peers. Each section is of one run on one machine, and says when and on which. `make bench` measures
everything again and rewrites the figures below; `python -m benchmarks --help` tells how to measure a part.

Contestants take turns, and a ratio is formed within each round: the figure is the median of the rounds, in brackets
the lowest and the highest. All processes are pinned alike and have as many threads as cores. Of several ways to use
a peer, the fastest is the one that counts. The scripts are in `benchmarks/scripts/`.

{BEGIN}
{END}
"""


class Measured(msgspec.Struct, frozen=True):
    """A result, and the machine that it is of."""

    machine: Machine
    result: Result


class Report(msgspec.Struct, frozen=True):
    """What each benchmark has found when it was run last."""

    results: dict[str, Measured]

    def with_new(self, results: Mapping[str, Result], machine: Machine, order: Iterable[str]) -> Report:
        """Returns this report with new results of this machine, in the suite's order."""
        kept = {**self.results, **{name: Measured(machine, result) for name, result in results.items()}}
        return Report({name: kept[name] for name in order if name in kept})


def read(folder: Path) -> Report | None:
    path = folder / "benchmarks.json"
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else None


def write(report: Report, folder: Path) -> list[Path]:
    """Write the record and the page; returns their paths."""
    record, page = folder / "benchmarks.json", folder / "benchmarks.md"
    text = page.read_text() if page.exists() else _PAGE
    replaced = replace_figures(text, figures(report), str(page))
    record.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    page.write_text(replaced)
    return [record, page]


def replace_figures(page: str, figures: str, name: str) -> str:
    """The page with other figures between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidInput("page", name, f"it must have the lines {BEGIN} and {END}, between which the figures go")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


# ── the figures, in Markdown ─────────────────────────────────────────────────────────────────────────────────


def figures(report: Report) -> str:
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from ("", "![Ratios and their bars](benchmarks.png)", "")
    held = [claim for of_one in report.results.values() for claim in of_one.result.claims if claim.bar]
    yield from _table(("what", "bar", "measured", ""), (_claim_row(claim) for claim in held))
    for name, of_one in report.results.items():
        result = of_one.result
        yield from (
            f"## {result.title}",
            "",
            f"`python -m benchmarks {name}`, {result.measured}, {of_one.machine}.",
            "",
        )
        rows = (
            (one.name, f"{one.median:.4g}", f"{min(one.rounds):.4g} – {max(one.rounds):.4g}", one.unit)
            for one in result.series
        )
        yield from _table(("", "median", "lowest – highest", "unit"), rows)
        yield from _table(("ratio", "bar", "measured", ""), (_claim_row(claim) for claim in result.claims))
        if result.plot is not None:
            yield from (f"![{result.plot.y}, by {result.plot.x}]({picture(name)})", "")
        for note in result.notes:
            yield from (note, "")


def picture(name: str) -> str:
    """The file with that benchmark's plot."""
    return f"benchmarks-{name}.png"


def _claim_row(claim: Claim) -> tuple[str, str, str, str]:
    return claim.text, claim.bar, claim.figure, verdict(claim)


def verdict(claim: Claim) -> str:
    return {True: "reached", False: "**not reached**", None: ""}[claim.reached]


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield f"|{' --- |' * len(heading)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
