"""Where the list of operations is cut: so that the slowest stage is as fast as possible, and then so that few bytes
cross; or where the user says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from paceline.errors import ModelError, StrategyError, nearest_first
from paceline.split.balance import best_places
from paceline.split.stages.measure import Measured, last_uses
from paceline.split.trace import Traced

MOST_PLACES = 300  # among which the best are looked for
SLACK = 1.03  # how much slower the slowest stage may be for fewer bytes
_NAMED = 6  # names in an error


def by_cost(traced: Traced, measured: Measured, stages: int) -> list[int]:
    """Returns the positions at which the second stage begins, the third …"""
    crossing = bytes_crossing(traced, measured)
    total = list(itertools.accumulate(measured.seconds, initial=0.0))
    places = [place for place in range(1, len(measured.seconds)) if place not in measured.forbidden]
    if len(places) < stages - 1:
        whole = next(iter(traced.whole.items()), None)
        why = f"; {whole[0]} is kept as a whole because its forward cannot be followed ({whole[1]})" if whole else ""
        raise ModelError(
            "stages", stages, f"the model can be cut at {len(places)} places only, give at most {len(places) + 1}{why}"
        )
    places = _fewer(places, total, crossing)
    handed = [crossing[place] * measured.seconds_a_byte for place in range(len(crossing))]
    limit, _ = best_places(places, total, handed, crossing, stages, None)
    _, best = best_places(places, total, handed, crossing, stages, limit * SLACK)
    return best


def bytes_crossing(traced: Traced, measured: Measured) -> list[int]:
    """Returns by place how many bytes are alive that come from before and are used behind."""
    crossing = [0] * (len(measured.bytes) + 1)
    for number, (size, until) in enumerate(zip(measured.bytes, last_uses(traced), strict=True)):
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


def at_modules(model: nn.Module, traced: Traced, names: Sequence[str]) -> list[int]:
    """Returns the positions of the first operations of these modules."""
    begins: dict[str, int] = {}
    for number, node in enumerate(traced.nodes):
        for path, _ in node.meta.get("nn_module_stack", {}).values():
            begins.setdefault(path, number)
    found: list[int] = []
    for name in names:
        if name not in begins:
            _explain(model, traced, name, list(begins))
        place = begins[name]
        if place == 0:
            raise StrategyError("cut-at", name, "the model begins there, so the first stage would be empty")
        if found and place <= found[-1]:
            raise StrategyError("cut-at", ",".join(names), f"{name} comes before the others, name them in order")
        found.append(place)
    return found


def _explain(model: nn.Module, traced: Traced, name: str, known: list[str]) -> None:
    """Raises the sentence for a module at which no stage can begin."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        outer = ".".join(parts[:length])
        if outer in known and name in dict(model.named_modules()):
            why = traced.whole.get(outer, "a module of torch.nn")
            raise StrategyError("cut-at", name, f"it lies inside {outer}, which is kept as a whole ({why}), name that")
    near = nearest_first(name, known)
    more = ", …" if len(near) > _NAMED else ""
    raise StrategyError("cut-at", name, f"give a module that the model calls: {', '.join(near[:_NAMED])}{more}")


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


def follow(traced: Traced, first: Traced, places: Sequence[int]) -> list[int]:
    """Returns where another trace of the same model is cut: every module stays on its stage."""
    mine, firsts = traced.nodes, first.nodes
    if [(node.op, node.target) for node in mine] == [(node.op, node.target) for node in firsts]:
        return list(places)
    stage_of: dict[object, int] = {}
    for number, node in enumerate(firsts):
        if node.op == "call_module":
            stage_of.setdefault(node.target, sum(place <= number for place in places))
    found = [len(mine)] * len(places)
    stage = 0
    for number, node in enumerate(mine):
        now = max(stage, stage_of.get(node.target, 0) if node.op == "call_module" else 0)
        for begun in range(stage, now):
            found[begun] = number
        stage = now
    return found
