"""The numbers in words: is sync better than async, is it faster, does a cut model help, is the result any different?

Each answer is yes, no, or too close to say, by the spread over repeats (`spread`), with the figures it rests on. What
was not measured is not answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.compare.spread import MeasuredDifference, difference, ratio
from paceline.compare.summary import WaySummary
from paceline.compare.ways import Way
from paceline.watch.target import Target

METRIC_MARGIN = 0.01  # of the target: a difference that nobody minds


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question, its answer in one word or three, and the reason."""

    question: str
    answer: str  # yes, no, too close to say
    because: str

    def __str__(self) -> str:
        return f"{self.question} {self.answer[0].upper()}{self.answer[1:]}: {self.because}."


def answer_all(summaries: Sequence[WaySummary], target: Target, *, to_end: bool) -> list[AnsweredQuestion]:
    """Whatever can be said of these."""
    measured = [summary for summary in summaries if summary.done]
    sync = _first(measured, lambda way: way.kind == "sync", lambda way: way.kind == "accept", _is_mirrored)
    others = _first(measured, lambda way: way.kind == "async", lambda way: way.kind == "bounded")
    one = _first(measured, lambda way: way.kind == "one")
    answers: list[AnsweredQuestion] = []
    if sync is not None and others is not None:
        answers.append(_better(sync, others, target, to_end=to_end))
        answers.append(_faster(f"Is {sync.way.name} faster than {others.way.name}?", sync, others))
    for cut in (summary for summary in measured if summary.way.is_cut):
        if one is not None:
            answers.append(_faster(f"Does {cut.way.name} help against one device?", cut, one))
    if len(measured) > 1:
        answers.append(_any_different(measured, target, to_end=to_end))
    return answers


def in_words(summaries: Sequence[WaySummary], target: Target, *, to_end: bool) -> str:
    """The paragraph."""
    sentences = [str(answer) for answer in answer_all(summaries, target, to_end=to_end)]
    finished = [summary for summary in summaries if summary.reaches]
    if len(finished) > 1:
        ranked = sorted(finished, key=lambda summary: _mean(summary, "seconds"))
        names = [f"{summary.way.name} ({_mean(summary, 'seconds'):.3g} s)" for summary in ranked]
        sentences.insert(0, f"To {target} by seconds of training: {', '.join(names)}.")
    for summary in summaries:
        if summary.failed is not None:
            sentences.append(f"{summary.way.name} failed and is left out.")
        elif not summary.reaches:
            sentences.append(_not_reached(summary, target))
        if (wasted := summary.over("thrown_away")) is not None and wasted.mean >= 0.005:
            sentences.append(f"{summary.way.name} threw away {wasted.mean:.1%} of its gradients.")
    if summaries and max(len(summary.done) for summary in summaries) == 1:
        sentences.append("One repeat has no spread: --repeats 3 would tell differences from chance.")
    return " ".join(sentences)


def _first(summaries: Sequence[WaySummary], *wanted: Callable[[Way], bool]) -> WaySummary | None:
    return next((summary for test in wanted for summary in summaries if test(summary.way)), None)


def _is_mirrored(way: Way) -> bool:
    return way.kind == "mirrored"


def _mean(summary: WaySummary, field: str) -> float:
    found = summary.over(field)
    return found.mean if found is not None else math.nan


def _better(one: WaySummary, other: WaySummary, target: Target, *, to_end: bool) -> AnsweredQuestion:
    """By the result if runs went to their end, else by the samples that the target has cost."""
    names = f"{one.way.name} better than {other.way.name}"
    if to_end:
        found = difference(one.by_repeat("value"), other.by_repeat("value"), METRIC_MARGIN * abs(target.value))
        good = "more" if target.upwards else "less"
        figures = f"{target.metric} at the end {one.over('value')} against {other.over('value')}"
        return AnsweredQuestion(
            f"Does {names.replace(' better than', ' end better than')}?", _say(found, good), figures
        )
    question = f"Does {one.way.name} learn more from a sample than {other.way.name}?"
    if (unfinished := _unfinished(question, one, other)) is not None:
        return unfinished
    found = ratio(one.by_repeat("samples"), other.by_repeat("samples"))
    figures = f"{_mean(one, 'samples'):.0f} samples to the target against {_mean(other, 'samples'):.0f}"
    return AnsweredQuestion(question, _say(found, "less"), figures + _times(found))


def _faster(question: str, one: WaySummary, other: WaySummary) -> AnsweredQuestion:
    if (unfinished := _unfinished(question, one, other)) is not None:
        return unfinished
    found = ratio(one.by_repeat("seconds"), other.by_repeat("seconds"))
    figures = f"{one.over('seconds')} s to the target against {other.over('seconds')} s"
    return AnsweredQuestion(question, _say(found, "less"), figures + _times(found))


def _unfinished(question: str, one: WaySummary, other: WaySummary) -> AnsweredQuestion | None:
    """The answer if one of them, or none, has come to the target at all."""
    if one.reached and other.reached:
        return None
    if not one.reached and not other.reached:
        return AnsweredQuestion(question, "too close to say", "neither reached the target")
    winner, loser = (one, other) if one.reached else (other, one)
    reason = f"{winner.way.name} reached the target in {len(winner.reached)} of {len(winner.done)} runs and "
    return AnsweredQuestion(question, "yes" if winner is one else "no", f"{reason}{loser.way.name} in none")


def _any_different(summaries: Sequence[WaySummary], target: Target, *, to_end: bool) -> AnsweredQuestion:
    """Between those two that lie furthest apart."""
    question = "Is the result any different?"
    ranked = sorted((s for s in summaries if s.over("value") is not None), key=lambda s: _mean(s, "value"))
    if len(ranked) < 2:
        return AnsweredQuestion(question, "too close to say", f"{target.metric} is known of fewer than two strategies")
    low, high = ranked[0], ranked[-1]
    found = difference(high.by_repeat("value"), low.by_repeat("value"), METRIC_MARGIN * abs(target.value))
    when = "at the end" if to_end else "when each run stopped at the target (--to-end lets them finish)"
    figures = (
        f"{target.metric} is between {low.over('value')} ({low.way.name}) and {high.over('value')} "
        f"({high.way.name}) {when}"
    )
    return AnsweredQuestion(question, _say(found, "more"), figures)


def _not_reached(summary: WaySummary, target: Target) -> str:
    best = summary.over("best")
    count = len(summary.done) - len(summary.reached)
    times = "" if len(summary.done) == 1 else f" in {count} of {len(summary.done)} runs"
    how_far = f", at best {best}" if best is not None else ""
    last = next((one for one in summary.done if not one.reached), None)
    by = f", stopped by --{last.stopped_by}" if last is not None and last.stopped_by else ", when the script ended"
    return f"{summary.way.name} did not reach {target}{times}{how_far}{by}."


def _say(found: MeasuredDifference | None, good: str) -> str:
    if found is None or found.verdict == "too close":
        return "too close to say"
    return "yes" if found.verdict == good else "no"


def _times(found: MeasuredDifference | None) -> str:
    if found is None or found.half is None:
        return ""
    low, high = (found.mean * math.exp(sign * found.half) for sign in (-1, 1))
    return f", {found.mean:.2f} times as much ({low:.2f} to {high:.2f})"
