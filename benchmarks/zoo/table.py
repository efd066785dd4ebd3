"""All cells: kept in a file beside the page that is written of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from benchmarks.zoo.cell import EQUAL, REFUSED, VERDICTS, Cell
from benchmarks.zoo.models import MODELS, Model
from benchmarks.zoo.strategies import STRATEGIES, Strategy

Key = tuple[str, str]  # of a cell: model, strategy
_HEAD = """\
# The zoo

Published architectures in small configurations, with random weights, the loss people use with them and made-up data,
under every strategy. Each cell is a real run of [one script](../benchmarks/zoo/train.py) in real processes: three
updates in float64, of which every loss and afterwards every parameter is compared with those of one process, to 10⁻⁹ of
the tensor's largest value. `make zoo` makes this page.
"""
_NOTES = """\
- **equal**, with the largest difference found. **refused**: Paceline ended the run with one sentence, below. Anything
  else is a mistake of ours, unless its reason stands here. – : there is nothing to cut that way.
- Replicas and stages draw other masks of dropout than one process does, see
  [train](train.md#dropout-and-other-random-numbers). So dropout is off there, and as the model comes with it elsewhere.
  The last column has it with two replicas, and compares two runs, bit by bit.
- The loss of CLIP is over all pairs of a batch, and a part of a batch has other pairs: where the batch is computed in
  parts, by replicas or as micro-batches, it is compared with one process that computes as many parts (`accumulate=…`).
- Servers and stages take BatchNorm's statistics over parts of a batch; those runs are compared with one process that
  computes a batch in two passes (`accumulate=2`).
- A layout cuts all of {dims} that `paceline dims` finds, but of two that one parameter has
  the first alone: they cannot lie along the same axis.
- With `pl.whole` the experts of Mixtral, encoder and decoder of Whisper, the encoder of wav2vec2 and its loss are
  [kept whole](split.md#what-decides-by-values). The rest of those models is cut.
"""


class Results:
    """The cells that were run so far, in a file that is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        cells = msgspec.json.decode(path.read_bytes(), type=list[Cell]) if path.exists() else []
        self.cells: dict[Key, Cell] = {(cell.model, cell.strategy): cell for cell in cells}

    def add(self, cell: Cell) -> None:
        self.cells[cell.model, cell.strategy] = cell
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(list(self.cells.values()))) + b"\n")
        unfinished.replace(self._path)


def all_pairs() -> list[tuple[Model, Strategy]]:
    """Every cell of the table, strategy by strategy."""
    models = [model for model in MODELS.values() if model.in_table]
    return [(model, strategy) for strategy in STRATEGIES.values() for model in models if strategy.applies(model)]


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """How many cells have which verdict, those that none has left out."""
    found = Counter(cell.verdict for cell in cells)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def page(cells: Mapping[Key, Cell]) -> str:
    """The whole of `docs/zoo.md`."""
    pairs = all_pairs()
    run = [cells[key] for model, strategy in pairs if (key := (model.name, strategy.name)) in cells]
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts(run).items())
    missing = f", {len(pairs) - len(run)} not run" if len(run) < len(pairs) else ""
    several = len({cell.code for cell in run}) > 1
    mixed = " The cells are of several states of the code: `make zoo` makes them all of one." if several else ""
    packages = "; or ".join(dict.fromkeys(cell.packages for cell in run))
    dims = "heads, hidden, channels and vocab"
    parts = [
        _HEAD,
        f"**{len(run)} cells: {total}{missing}.**{mixed} With {packages}.\n",
        _matrix(cells),
        _NOTES.format(dims=dims),
        _sentences("What went wrong", [cell for cell in run if cell.verdict not in (EQUAL, REFUSED)]),
        _sentences("What was refused, and how", [cell for cell in run if cell.verdict == REFUSED]),
    ]
    return "\n".join(part for part in parts if part)


def _matrix(cells: Mapping[Key, Cell]) -> str:
    lines = [f"| | {' | '.join(strategy.words for strategy in STRATEGIES.values())} |"]
    lines.append("| --- |" + " --- |" * len(STRATEGIES))
    for model in (model for model in MODELS.values() if model.in_table):
        row = [_shown(cells.get((model.name, one.name)), one.applies(model)) for one in STRATEGIES.values()]
        lines.append(f"| {model.name} ({model.made_by or 'plain torch'}) | {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def _shown(cell: Cell | None, applies: bool) -> str:
    if cell is None:
        return "not run" if applies else "–"
    if cell.verdict == EQUAL:
        return f"equal {cell.words.partition(' ')[0]}"
    return cell.verdict if cell.verdict == REFUSED else f"**{cell.verdict}**"


def _sentences(title: str, cells: list[Cell]) -> str:
    """Cells that are not equal, those that say the same together."""
    if not cells:
        return ""
    by_words: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        by_words.setdefault((cell.strategy, cell.verdict, cell.words), []).append(cell.model)
    lines = [f"## {title}\n", "| strategy | models | what was said |", "| --- | --- | --- |"]
    for (strategy, verdict, words), models in by_words.items():
        said = words.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {strategy} | {', '.join(models)} | {'' if verdict == REFUSED else f'{verdict}: '}{said} |")
    return "\n".join([*lines, ""])
