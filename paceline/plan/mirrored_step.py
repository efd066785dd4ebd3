"""The step of mirrored replicas: gradients lie in shared memory, and go between hosts while backward still runs.

    replicas      forward ─▶ backward ─▶ backward ─▶ … ────────────────┐
    hosts                       └▶ sum ─▶ reduce ─▶ add ─▶ gather ─▶ … ┤    bucket after bucket, one after another
    closing                                                            └▶ update own shard ─▶ meet

As `paceline.mirrored` does it. On one host nothing travels: owners sum their shards when all have arrived. Between
hosts a bucket goes when every replica of every host has finished it: the last host's link carries all of its part after
that moment, so when the others began does not matter. A bucket crosses a link twice, (H - 1) / H of it each time: to
whoever sums a part, and back. All hosts' links do the same at the same time, and are one resource with copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import InvalidInput
from paceline.plan.step import CLOSING, TOGETHER, StepCost, StepDescription, StepDraft, backward_runs

BUCKET_BYTES = 8 << 20


def mirrored_step(
    cost: StepCost,
    *,
    replicas: int,
    hosts: int = 1,
    link: float = math.inf,
    latency_s: float = 0.0,
    wire: float = 1.0,
    code_s: float = 0.0,
    meet_s: float = 0.0,
    bucket_bytes: float = BUCKET_BYTES,
    most_buckets: int = 64,
) -> StepDescription:
    """Returns the description of a step.

    `replicas`: on all hosts together. `link`: bytes a second, each way, of a host. `latency_s`: of a message between
    hosts. `wire`: what of a gradient's bytes crosses a link, 0.5 of bf16. `code_s`: coding and decoding the whole model
    by one core. `meet_s`: until all of a host know that all have arrived. `bucket_bytes`: of a host's bucket, for each
    of its replicas.

    >>> from paceline.plan.step import StepCost
    >>> step = mirrored_step(StepCost.whole(0.3, 8e6), replicas=2, hosts=2, link=1e9)
    >>> [piece.name for piece in step.pieces]
    ['forward', 'backward', 'forward', 'backward', 'sum', 'reduce', 'add', 'gather', 'update', 'update', 'meet']
    """
    here = _replicas_of_host(replicas, hosts)
    made = StepDraft()
    runs = backward_runs(cost.layers, bucket_bytes * here, most_buckets) if hosts > 1 else []
    chains = []
    cores = [made.resource("replica's core", replica) for replica in range(replicas)]
    for replica, core in enumerate(cores):
        _load(made, cost, replica)
        computed = made.piece("forward", "compute", replica, [core], seconds=cost.forward_s)
        chain = []
        for seconds in [run.seconds for run in runs] or [cost.backward_s]:
            computed = made.piece("backward", "compute", replica, [core], seconds=seconds, after=[computed])
            chain.append(computed)
        chains.append(chain)
    if hosts > 1:
        between = BetweenHostsPieces(made, cost, here, hosts, link, latency_s, wire, code_s)
        landed: list[int] = []
        for bucket, run in enumerate(runs):
            landed = between.exchange(run.bytes, [*(chain[bucket] for chain in chains), *landed])
    _update(made, cost, cores, here, meet_s, latency_s if hosts > 1 else 0.0, sums=hosts == 1)
    return made.step(_words(replicas, hosts), replicas)


def local_steps(
    cost: StepCost,
    *,
    every: int,
    replicas: int,
    hosts: int = 1,
    link: float = math.inf,
    latency_s: float = 0.0,
    wire: float = 1.0,
    code_s: float = 0.0,
    meet_s: float = 0.0,
) -> StepDescription:
    """Returns the description of replicas that each make `every` steps of their own, and then take the mean of all.

    What is exchanged is the parameters, when the last of these steps is over: nothing of it can be overlapped.
    """
    if every < 1:
        raise InvalidInput("every", every, "give at least 1")
    here = _replicas_of_host(replicas, hosts)
    made = StepDraft()
    cores = [made.resource("replica's core", replica) for replica in range(replicas)]
    ends = []
    for replica, core in enumerate(cores):
        _load(made, cost, replica, every)
        before: list[int] = []
        for turn in range(every):
            seconds = cost.compute_s
            computed = made.piece("compute", "compute", replica, [core], seconds=seconds, after=before, turn=turn)
            seconds = cost.update_s
            before = [made.piece("update", "update", replica, [core], seconds=seconds, after=[computed])]
        ends += before
    if hosts > 1:
        BetweenHostsPieces(made, cost, here, hosts, link, latency_s, wire, code_s).exchange(cost.bytes, ends)
    elif replicas > 1:
        made.piece("sum", "update", TOGETHER, [], seconds=cost.sum_s, after=ends)
    made.piece("meet", "wait", CLOSING, [], seconds=meet_s)
    strategy = f"{_words(replicas, hosts)}, the mean every {every} steps"
    return made.step(strategy, replicas, turns_a_step=every)


class BetweenHostsPieces:
    """Adds buckets that are summed over hosts to a description."""

    def __init__(
        self,
        made: StepDraft,
        cost: StepCost,
        here: int,
        hosts: int,
        link: float,
        latency_s: float,
        wire: float,
        code_s: float,
    ) -> None:
        self._made, self._cost, self._here, self._hosts = made, cost, here, hosts
        self._latency_s, self._wire, self._code_s = latency_s, wire, code_s
        self._links = made.resource("hosts' links", copies=hosts, rate=link)
        self._memory = made.resource("hosts' memory", copies=hosts)

    def exchange(self, size: float, after: Sequence[int]) -> list[int]:
        """Adds the way of a bucket of so many bytes; returns the piece that is its end."""
        made, share = self._made, size / self._cost.bytes if self._cost.bytes else 0.0
        memory, links, hosts = [self._memory], [self._links], self._hosts
        over_links = (hosts - 1) * size * self._wire  # (H - 1) / H over each of H links
        # Each of a host's owners has 1 / here of the bucket, reads it from all replicas, and codes it.
        sum_s = share * (self._cost.sum_s * (self._here - 1) + self._code_s) / self._here
        last = made.piece("sum", "update", TOGETHER, memory, seconds=sum_s, after=after)
        way_s = self._latency_s
        last = made.piece("reduce", "exchange", TOGETHER, links, seconds=way_s, bytes=over_links, after=[last])
        add_s = share * (self._cost.sum_s * (hosts - 1) / hosts + self._code_s) / self._here
        last = made.piece("add", "update", TOGETHER, memory, seconds=add_s, after=[last])
        last = made.piece("gather", "exchange", TOGETHER, links, seconds=way_s, bytes=over_links, after=[last])
        return [last]


def _replicas_of_host(replicas: int, hosts: int) -> int:
    if hosts < 1 or replicas < 1 or replicas % hosts:
        raise InvalidInput("replicas, hosts", (replicas, hosts), "give as many replicas to every host, at least 1")
    return replicas // hosts


def _words(replicas: int, hosts: int) -> str:
    return f"{replicas} mirrored {'replica' if replicas == 1 else 'replicas'}" + (
        f" on {hosts} hosts" if hosts > 1 else ""
    )


def _load(made: StepDraft, cost: StepCost, replica: int, batches: int = 1) -> None:
    if cost.input_s:
        feed = made.resource("replica's input", replica)
        made.piece("load", "input", replica, [feed], seconds=cost.input_s * batches)


def _update(
    made: StepDraft, cost: StepCost, cores: Sequence[int], here: int, meet_s: float, latency_s: float, *, sums: bool
) -> None:
    """Adds the closing: every owner sums its shard, unless that is done, and updates it."""
    sum_s = cost.sum_s * (here - 1) if sums else 0.0
    done = [made.piece("update", "update", CLOSING, [core], seconds=(sum_s + cost.update_s) / here) for core in cores]
    # Loss and counts are added up by a small sum between hosts: there and back.
    made.piece("meet", "wait", CLOSING, [], seconds=meet_s + 2 * latency_s, after=done)
