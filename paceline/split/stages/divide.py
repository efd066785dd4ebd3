"""Where the list of operators is cut: so that the slowest stage is as fast as possible, and then so that few bytes
cross; or where the user says."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from paceline.errors import ModelError, StrategyError, nearest_first
from paceline.graph.call_graph import CallGraph
from paceline.split.balance import best_places
from paceline.split.stages.measure import Measured, last_uses

MOST_PLACES = 300  # among which the best are looked for
SLACK = 1.03  # how much slower the slowest stage may be for fewer bytes
_NAMED = 6  # names in an error


def by_cost(call: CallGraph, measured: Measured, stages: int) -> list[int]:
    """Returns the positions at which the second stage begins, the third …"""
    crossing = bytes_crossing(call, measured)
    total = list(itertools.accumulate(measured.seconds, initial=0.0))
    places = [place for place in range(1, len(measured.seconds)) if place not in measured.forbidden]
    if len(places) < stages - 1:
        raise ModelError(
            "stages", stages, f"the model can be cut at {len(places)} places only, give at most {len(places) + 1}"
        )
    places = _fewer(places, total, crossing)
    handed = [crossing[place] * measured.seconds_a_byte for place in range(len(crossing))]
    limit, _ = best_places(places, total, handed, crossing, stages, None)
    _, best = best_places(places, total, handed, crossing, stages, limit * SLACK)
    return best


def bytes_crossing(call: CallGraph, measured: Measured) -> list[int]:
    """Returns by place how many bytes are alive that come from before and are used behind."""
    crossing = [0] * (len(measured.bytes) + 1)
    for number, (size, until) in enumerate(zip(measured.bytes, last_uses(call), strict=True)):
        for place in range(number + 1, min(until, len(measured.bytes) - 1) + 1):
            crossing[place] += size
    return crossing


def _fewer(places: list[int], total: Sequence[float], crossing: Sequence[int]) -> list[int]:
    """Returns, of very many places, one in every span of time, where the fewest bytes cross."""
    if len(places) <= MOST_PLACES:
        return places
    best: dict[int, int] = {}
    for place in places:
        span = int(total[place] / total[-1] * MOST_PLACES)
        if span not in best or crossing[place] < crossing[best[span]]:
            best[span] = place
    return sorted(best.values())


def at_modules(model: nn.Module, call: CallGraph, names: Sequence[str]) -> list[int]:
    """Returns the positions of the first operators of these modules."""
    begins: dict[str, int] = {}
    for number, node in enumerate(call.nodes):
        for path in node.meta.get("modules", ()):
            begins.setdefault(path, number)
    found: list[int] = []
    for name in names:
        if name not in begins:
            near = nearest_first(name, list(begins))
            more = ", …" if len(near) > _NAMED else ""
            raise StrategyError("cut-at", name, f"give a module that the model calls: {', '.join(near[:_NAMED])}{more}")
        place = begins[name]
        if place == 0:
            raise StrategyError("cut-at", name, "the model begins there, so the first stage would be empty")
        if found and place <= found[-1]:
            raise StrategyError("cut-at", ",".join(names), f"{name} comes before the others, name them in order")
        found.append(place)
    return found


def check(measured: Measured, places: Sequence[int], names: Sequence[str]) -> None:
    """Refuses a place that the user has named where the model cannot be cut."""
    for place, name in zip(places, names, strict=True):
        if place in measured.forbidden:
            raise StrategyError(
                "cut-at",
                name,
                "something that belongs together lies on both sides (a change in place, a buffer, a no_grad block or "
                "a value that cannot travel), choose another module",
            )


def follow(call: CallGraph, stage_of: Mapping[str, int], stages: int) -> list[int]:
    """Returns where another graph of the same model is cut: parameters are used on the stages that had them first."""
    names = call.names
    found = [len(call.nodes)] * (stages - 1)
    stage = 0
    for number, node in enumerate(call.nodes):
        used = (stage_of.get(names[source], 0) for source in node.all_input_nodes if source in names)
        now = max([stage, *used])
        for begun in range(stage, now):
            found[begun] = number
        stage = now
    return found
