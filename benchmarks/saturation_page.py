"""The page of `python -m benchmarks.saturation`: tables, and what is known, fitted and predicted in each picture."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from benchmarks.saturation_charts import Backups, Chart, Inception, NullSteps, OwnRuns, SpeedUps

_UNITS = re.compile(r"(\d) (%|s\b|ms\b|µs\b|MB|GB)")  # a number and its unit stay in one line


def write_page(
    chart: Chart, null: NullSteps, backups: Backups, inception: Inception, ups: SpeedUps, own: OwnRuns
) -> str:
    """Writes page and pictures; returns the page's path."""
    chart.null_steps(null)
    chart.backups(backups)
    chart.inception(inception)
    chart.speed_ups(ups)
    parts = [
        _opening(),
        _null_text(null),
        _backups_text(backups),
        _inception_text(inception),
        _ups_text(ups),
        _own_text(own),
        _END,
    ]
    path = chart.folder / "saturation.md"
    path.write_text("\n\n".join(_wrapped(part) for part in parts) + "\n")
    return str(path)


def _wrapped(text: str) -> str:
    """Returns paragraphs and the points of lists in lines of a page's width; tables and headings as they are."""
    blocks: list[str] = []
    for line in text.strip().splitlines():
        if not line or line.startswith(("|", "#", "!", "- ")) or not blocks or not blocks[-1] or blocks[-1][0] in "|#!":
            blocks.append(line)
        else:
            blocks[-1] += " " + line.strip()
    width = 118
    blocks = [line if line[:1] in "|#!" else _UNITS.sub("\\1\u00a0\\2", line) for line in blocks]
    lines = [
        line
        if not line or line[0] in "|#!"
        else textwrap.fill(
            line,
            width,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in blocks
    ]
    return "\n".join(lines)


def _opening() -> str:
    return """
# Where adding devices stops helping: published figures, and ours

The simulator behind `paceline plan` ([plan/simulate.py](../paceline/plan/simulate.py)) is run on what others have
measured and published, and at the end on runs of our own. `python -m benchmarks.saturation` makes this page and its
pictures in a few minutes.

How sure the published figures are: **[notes]** are figures that two independent summaries of a paper give; we have
read the papers' abstracts ([TensorFlow, OSDI 2016](https://arxiv.org/abs/1605.08695);
[Chen et al. 2016](https://arxiv.org/abs/1604.00981)), and not the pages with these figures. **[textbook]** are Jeff
Dean's figures of 2016 as a textbook repeats them, and **[announced]** is Google's announcement of distributed
TensorFlow of April 2016, as it is usually quoted. What anybody only remembers is not here.

In every picture hollow marks are published, lines are simulated. *Fitted* are the published points that a number of
ours was chosen by; everything else on a line is *predicted*.
"""


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _off(ours: float, theirs: float) -> str:
    """
    >>> _off(7.0, 10.0)
    '−30 %'
    """
    return f"{100 * (ours / theirs - 1):+.0f} %".replace("-", "−")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _null_text(found: NullSteps) -> str:
    fitted = {("scalar", 1), ("scalar", 100), ("dense, 1 GB", 1)}
    rows = []
    for name, points in found.theirs.items():
        for workers, theirs in points.items():
            ours = found.ours[name][found.workers.index(workers)]
            how = "fitted" if (name, workers) in fitted else f"predicted, {_off(ours, theirs)}"
            rows.append(_row(name, workers, _ms(theirs), _ms(ours), how))
    table = "\n".join(rows)
    one = 100 * (found.theirs["dense, 100 MB"][1] / found.ours["dense, 100 MB"][0] - 1)
    hundred = 100 * (found.theirs["dense, 1 GB"][100] / found.ours["dense, 1 GB"][-1] - 1)
    return f"""
## 16 parameter servers, 1 to 100 workers

TensorFlow, OSDI 2016 [notes]: a step fetches the parameters from 16 servers, computes nothing worth mentioning and
sends a trivial update; all workers wait for one another.

![ms a step against workers](saturation-servers.png)

| what is fetched | workers | published, ms | simulated, ms | |
| --- | --- | --- | --- | --- |
{table}

- **Known:** 16 servers, sizes, numbers of workers.
- **Fitted, three numbers to three points:** a link carries {found.link / 1e9:.2f} GB/s each way, servers' and
  workers' alike; a server spends {1e6 * found.message_s:.0f} µs on a message, two messages a step; an empty step
  takes {1000 * found.fixed_s:.1f} ms besides.
- **Assumed:** shards are equal; a link is shared fairly; both ends have the same link.
- **What it shows:** as long as there are fewer workers than servers each worker's own link binds, and the step stays
  as it is. From 16 on the servers' links bind, and a step takes N·M / (P·B): twice the workers, twice the step,
  nothing gained.
- **Where they differ:** one worker that fetches 100 MB takes {one:.0f} % longer than a link alone would: a tenth of
  the bytes took a seventh of the time. There is a cost by tensor or by request that three numbers do not have.
  With 100 workers and 1 GB they took {hundred:.0f} % longer than simulated: a hundred streams into one link may well
  lose some of it, which fair shares do not. Sparse steps are published as a range that does not depend on the table's
  size. The simulator agrees on that for a simple reason, what is not fetched costs nothing, but would put them next to
  the scalar; looking rows up costs more than that.
"""


def _backups_text(found: Backups) -> str:
    table = "\n".join(
        _row(b, f"{step_s:.2f}", f"{100 * gain:.1f} %", *_published_backups(b, found))
        for b, step_s, gain in zip(found.spares, found.of_50_s, found.gains, strict=True)
    )
    fastest = found.spares[found.of_50_s.index(min(found.of_50_s))]
    best = found.spares[found.gains.index(max(found.gains))]
    converge = found.dropped[found.to_converge.index(min(found.to_converge))]
    near = [
        b for b, time in zip(found.dropped, found.to_converge, strict=True) if time <= 1.01 * min(found.to_converge)
    ]
    below = 0.3 ** (1 / 100)
    second = 0.3 + 100 * 0.3 * (1 - below) / below
    return f"""
## Backup workers

TensorFlow, OSDI 2016 [notes]: 50 workers, and b more; a step takes the first 50 gradients. Four are fastest, with
1.93 s a step; three gain most for what they cost, 9.5 % (steps a second, over those without, times 50 / (50 + b)).
Chen et al. 2016 [notes]: of 100 machines, 96 + 4 backups converged first.

![time of a step, gain and time to converge against spares](saturation-backups.png)

| b | simulated, s a step | simulated, gain | published, s a step | published, gain |
| --- | --- | --- | --- | --- |
{table}

- **Known:** the model is Inception-v3, 23.8 million parameters, 95 MB (27.2 million with its auxiliary classifier,
  which is left out). **Assumed:** 17 servers, as in the next section. **Taken from above:** link and message.
- **Fitted, three numbers to what is published of 50 + b:** {100 * found.times.chance:g} % of turns are slow, by
  {found.times.least:g} times or a little more; the others are alike (spread {100 * found.times.spread:g} %,
  assumed). A turn computes for {found.compute_s:.2f} s. The two numbers of the stragglers are the best of a coarse
  grid of 25 pairs (chances from 1.5 to 3.5 %, factors from 1.3 to 1.5); several pairs do nearly as well.
- **Predicted:** the rest of the left picture. {best} spares gain most; three gain {100 * found.gains[3]:.1f} %, where
  9.5 % are published. The simulated step is shortest with {fastest}, {min(found.of_50_s):.2f} s, by a hair: from four
  on it hardly changes. More spares do harm since every worker pulls the model, and the servers' links bind.
- **Predicted, and nothing fitted:** all of the right picture. Time to converge is that of a step times the number of
  steps, which is taken to grow as the accepted batch shrinks, as they report ("nearly linearly"). It is shortest with
  **{100 - converge} + {converge}**, and within 1 % of that with {near[0]} to {near[-1]} backups; they found 96 + 4.
- **What independent turns cannot do:** Chen et al. report that 80 % of the second-last gradients are there within
  2 s, and 30 % of the last [notes]. If every turn straggled by itself, 30 % of the last would mean
  {100 * second:.0f} % of the second-last (with F(2 s)¹⁰⁰ = 0.3). More of them are in time, so slowness sticks to
  machines: one that is usually slow among 99 equal ones fits both. The simulator has that too (`slow`), but what is
  published does not say more of it.
"""


def _published_backups(b: int, found: Backups) -> tuple[str, str]:
    step_s = f"{found.fastest[1]:.2f}, fastest" if b == found.fastest[0] else ""
    return step_s, f"{100 * found.best[1]:.1f} %, best" if b == found.best[0] else ""


def _inception_text(found: Inception) -> str:
    rows = []
    for workers, images in found.images_published.items():
        ours = [found.images_per_s[rule][found.workers.index(workers)] for rule in ("sync", "async")]
        rows.append(_row(f"images/s, {workers} workers [notes]", f"{images:,.0f}", *(f"{o:,.0f}" for o in ours)))
    for workers, speed_up in found.speed_ups_published.items():
        source = "[textbook]" if workers == 50 else "[announced]"
        ours = [found.speed_ups[rule][found.workers.index(workers)] for rule in ("sync", "async")]
        rows.append(_row(f"speed-up, {workers} GPUs {source}", f"{speed_up:.0f}×", *(f"{o:.0f}×" for o in ours)))
    table = "\n".join(rows)
    return f"""
## Inception-v3 on 17 servers

TensorFlow, OSDI 2016 [notes]: 2,300 images a second with 200 workers. Beside it stand the two published speed-ups of
Inception, of which it is not known on how many servers.

![images a second and speed-up against workers](saturation-inception.png)

| | published | sync, simulated | async, simulated |
| --- | --- | --- | --- |
{table}

- **Nothing is fitted here:** link and message come from the first section, compute time and stragglers from the
  second. **Assumed:** a worker's batch is {found.batch} images; one worker alone exchanges nothing.
- **What it shows:** at 200 workers a sync step is {_path(found.paths["sync"])}; a turn of async is
  {_path(found.paths["async"])}. Async is faster since one worker's pull goes on while another computes; whether its
  stale gradients are worth as much is another matter.
- **Where they differ:** 2,300 lies between the two, and our notes do not say which rule it was; images a second are
  also in proportion to a batch that is assumed. The published speed-ups lie a little above the sync line.
"""


def _path(shares: Mapping[str, float]) -> str:
    words = {"compute": "computing", "exchange": "links", "wait": "waiting for the slowest", "update": "updating"}
    return ", ".join(f"{100 * share:.0f} % {words.get(kind, kind)}" for kind, share in shares.items() if share > 0.005)


def _ups_text(found: SpeedUps) -> str:
    nmt, inception = dict(found.dense["NMT"]), dict(found.dense["Inception"])
    flat = next(count for count, speed_up in found.sparse if speed_up >= 0.99 * max(s for _, s in found.sparse))
    low, high = found.dense_on_50
    return f"""
## Dense models on 50 GPUs, sparse ones on 500

Jeff Dean [textbook]: dense models gain {low:.0f} to {high:.0f} times on 50 GPUs, sparse ones 300 times on 500; NMT 6
on 8, Inception 32 on 50, RankBrain 300 on 500. And Inception 56 on 100 [announced].

![speed-up against GPUs](saturation-speedups.png)

- **Known:** nothing of these models' steps or of the clusters. **Taken from above:** link, message, stragglers, 16
  servers.
- **Fitted, one number a curve, to its one point:** how long a turn computes for each second that the model is on a
  link. NMT {found.ratios["NMT"]:.1f}, Inception {found.ratios["Inception"]:.0f} (sync). RankBrain, async:
  {1000 * found.sparse_s:.0f} ms a turn, which pulls and pushes {found.rows_bytes / 1e6:g} MB of rows (assumed: too
  little to matter).
- **Predicted:** Inception on 100 GPUs: **{inception[100]:.0f}×**, published 56×. A model like NMT on 50:
  **{nmt[50]:.0f}×**, published for dense models {low:.0f} to {high:.0f}. On 200 it would be {nmt[200]:.0f}×: four
  times the GPUs for {nmt[200] / nmt[50]:.1f} times the speed.
- **What it shows:** a dense model saturates where N·M / (P·B) has grown to what a turn computes; what helps then is
  fewer bytes or more servers. A sparse one moves next to nothing, and goes on until servers are busy with messages.
- **Where they may differ:** the sparse line bends sharply at about {flat} and is flat from there, because every
  message takes the same. So the simulator can only explain 300 on 500 as a ceiling. Uneven rows (a few that everybody
  wants) and servers that are busy with other jobs would bend it earlier and more gently; one published point cannot
  tell these apart.
- 40 on 50 needs async, or machines that straggle less: with these stragglers sync steps wait so long for the slowest
  of 50 that a model with no bytes at all gains {found.no_bytes_on_50:.0f}×.
"""


def _own_text(found: OwnRuns) -> str:
    rows = []
    for number, (name, (measured, simulated)) in enumerate(found.samples_per_s.items()):
        how = f"predicted, {_off(simulated, measured)}" if number else "fitted"
        rows.append(_row(name, f"{measured:,.0f}", f"{simulated:,.0f}", how))
    table = "\n".join(rows)
    return f"""
## Our own runs: one of four replicas is five times slower

Real runs of Paceline with a server, from [benchmarks](benchmarks.md) (`python -m benchmarks straggler`).

| | measured, samples/s | simulated, samples/s | |
| --- | --- | --- | --- |
{table}

- **Known:** a sample sleeps for 2 ms, 96 samples make a step, or 32 an update of async. **Fitted, one number:** a step
  takes {1000 * found.beyond_s:.1f} ms beyond that.
"""


_END = """
## What the simulator leaves out

Switches between hosts (a link is a host's; what lies between is taken to be wide enough); lost packets and the start
of TCP streams; other jobs on the same machines, but for what straggling says; slowness that stays with a machine,
unless it is given; costs by tensor. Servers hold equal shards.
"""
