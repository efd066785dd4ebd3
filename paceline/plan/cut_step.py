"""The step of one model cut over devices: stages that hand on micro-batches, or devices that compute in rounds.

device 0   F0 F1    B0 F2 B1 F3 B2    B3         stages: each device does its pieces in the order of the schedule,
device 1      F0 B0 F1 B1 F2 B2 F3 B3            and a micro-batch's when its neighbour's has arrived

device 0   ── compute ──▶ exchange ── compute ──▶ exchange …      rounds: layouts, whose devices exchange parts of
device 1   ── compute ──▶ exchange ── compute ──▶ exchange …      activations, and tiles, which exchange their edges
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import InvalidInput
from paceline.plan.step import CLOSING, TOGETHER, StepDescription, StepDraft
from paceline.split.stage_schedule import order
from paceline.split.values import SCHEDULES


def stages_step(
    stages: Sequence[tuple[float, float]],
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    replicas: int = 1,
    boundary_bytes: float = 0.0,
    link: float = math.inf,
    latency_s: float = 0.0,
    update_s: float = 0.0,
    sum_s: float = 0.0,
) -> StepDescription:
    """Returns the description of a step of `replicas` pipelines on one host.

    `stages`: seconds of forward and of backward, of one micro-batch on each device. `boundary_bytes`: what a
    micro-batch hands to the next stage, and its gradient back. A wavefront is stages too: its blocks of time are
    micro-batches, and its schedule is gpipe. `sum_s`, `update_s`: of all parameters, by one core; all devices own.

    >>> step = stages_step([(0.1, 0.2)] * 2, micro_batches=2)
    >>> [piece.name for piece in step.pieces if piece.of == 0]
    ['forward 0', 'forward 1', 'backward 0', 'backward 1']
    """
    if schedule not in SCHEDULES:
        raise InvalidInput("schedule", schedule, f"one of {', '.join(SCHEDULES)}")
    if not stages or micro_batches < 1 or replicas < 1:
        raise InvalidInput("stages", (len(stages), micro_batches, replicas), "give stages, micro-batches and replicas")
    count = len(stages)
    made = StepDraft()
    cores = []
    for replica in range(replicas):
        first = replica * count
        cores += [made.resource("device's core", first + stage) for stage in range(count)]
        ways = {
            (stage, to): made.resource("devices' link", first + stage, rate=link)
            for stage in range(count)
            for to in (stage - 1, stage + 1)
            if 0 <= to < count
        }
        waiting = [order(schedule, stage, count, micro_batches) for stage in range(count)]
        given: dict[tuple[str, int, int], int] = {}  # what has come: direction, micro-batch, stage
        last: list[list[int]] = [[] for _ in stages]
        # Pieces are written down in an order in which they can be done: whatever has come is done next.
        while any(waiting):
            stuck = True
            for stage in range(count):
                while waiting[stage]:
                    direction, number = waiting[stage][0]
                    forward = direction == "forward"
                    comes = (stage > 0) if forward else (stage < count - 1)
                    if comes and (direction, number, stage) not in given:
                        break
                    waiting[stage].pop(0)
                    stuck = False
                    after = [*last[stage], *([given[direction, number, stage]] if comes else [])]
                    seconds = stages[stage][0 if forward else 1]
                    name, of = f"{direction} {number}", first + stage
                    done = made.piece(name, "compute", of, [cores[of]], seconds=seconds, after=after)
                    last[stage] = [done]
                    to = stage + 1 if forward else stage - 1
                    if 0 <= to < count:
                        if boundary_bytes or latency_s:
                            way, size = [ways[stage, to]], boundary_bytes
                            done = made.piece(
                                "hand on", "exchange", of, way, seconds=latency_s, bytes=size, after=[done]
                            )
                        given[direction, number, to] = done
            assert not stuck, "a schedule that waits for itself"
    devices = count * replicas
    seconds = (sum_s * (replicas - 1) + update_s) / devices
    for core in cores:
        made.piece("update", "update", CLOSING, [core], seconds=seconds)
    strategy = f"{count} stages, {micro_batches} micro-batches, {schedule}"
    return made.step(strategy if replicas == 1 else f"{replicas} replicas of {strategy}", devices)


def rounds_step(
    rounds: Sequence[tuple[float, float]],
    *,
    devices: int,
    link: float = math.inf,
    latency_s: float = 0.0,
    update_s: float = 0.0,
    strategy: str = "",
) -> StepDescription:
    """Returns the description of devices that compute in rounds, and exchange after each.

    `rounds`: the seconds each device computes, and the bytes each then sends. `link`: bytes a second out of a device.

    >>> step = rounds_step([(0.1, 1e6), (0.2, 0)], devices=2, link=1e9)
    >>> [piece.name for piece in step.pieces]
    ['compute', 'compute', 'exchange', 'compute', 'compute', 'update', 'update']
    """
    if devices < 1 or not rounds:
        raise InvalidInput("devices, rounds", (devices, len(rounds)), "give at least 1 of each")
    made = StepDraft()
    cores = [made.resource("device's core", device) for device in range(devices)]
    links = made.resource("devices' links", copies=devices, rate=link)
    before: list[list[int]] = [[] for _ in cores]
    for seconds, size in rounds:
        before = [
            [made.piece("compute", "compute", device, [core], seconds=seconds, after=before[device])]
            for device, core in enumerate(cores)
        ]
        if devices > 1 and (size or latency_s):
            after, all_bytes = [place for places in before for place in places], size * devices
            met = made.piece("exchange", "exchange", TOGETHER, [links], seconds=latency_s, bytes=all_bytes, after=after)
            before = [[met]] * devices
    for core in cores:
        made.piece("update", "update", CLOSING, [core], seconds=update_s / devices)
    return made.step(strategy or f"{devices} devices in rounds", devices)
