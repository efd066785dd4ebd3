"""The step of replicas whose parameters lie on servers: pull, compute, push, report; and the servers' closing.

    turn       ask ─▶ pull ─▶ forward ─▶ backward ─▶ … ─▶ report ─┐
                                   └▶ push ─▶ push ─▶ … ──────────┤
    closing                                                       └▶ sum the accepted ─▶ update ─▶ answer

As `paceline.central` does it: a pull is complete before forward begins; gradients are pushed while backward runs, in
order over one connection to each server; servers hold equal shards, so all are equally far at any moment; a step is
answered when all of them have made it; and a late replica computes to its end, is told so, and asks again.
"""

from __future__ import annotations

import math

from paceline.errors import InvalidInput
from paceline.plan.step import CLOSING, StepCost, StepDescription, StepDraft, backward_runs
from paceline.rules import Rule, Sync

BUCKET_BYTES = 8 << 20


def servers_step(
    cost: StepCost,
    *,
    replicas: int,
    servers: int,
    link: float = math.inf,
    server_link: float | None = None,
    hosts: int | None = None,
    rule: Rule | None = None,
    latency_s: float = 0.0,
    message_s: float = 0.0,
    pull_bytes: float | None = None,
    push_bytes: float | None = None,
    bucket_bytes: float = BUCKET_BYTES,
    most_buckets: int = 16,
) -> StepDescription:
    """Returns the description of a step.

    `link`, `server_link`: bytes a second, each way, of a replica's host and of each server (the same, unless given);
    infinite is shared memory. `hosts`: on how many the replicas are, else on one each. `message_s`: what a server's
    core spends on one message of one replica. `pull_bytes`, `push_bytes`: what a replica's turn pulls and pushes, if
    that is not the whole model (rows of a table, another wire). `most_buckets`: pushes of a turn at most.

    >>> from paceline.plan.step import StepCost
    >>> step = servers_step(StepCost.whole(0.3, 100e6), replicas=2, servers=1, link=1e9, bucket_bytes=1e9)
    >>> [piece.name for piece in step.pieces if piece.of == 0]
    ['pull', 'forward', 'backward', 'push', 'report']
    """
    if replicas < 1 or servers < 1:
        raise InvalidInput("replicas, servers", (replicas, servers), "give at least 1 of each")
    if hosts is not None and not 1 <= hosts <= replicas:
        raise InvalidInput("hosts", hosts, f"give 1 to {replicas}, the number of replicas")
    rule = rule or Sync()
    rule.check_replicas(replicas)
    accepted = _accepted(rule, replicas)
    server_link = link if server_link is None else server_link
    pull_bytes = cost.bytes if pull_bytes is None else pull_bytes
    push_bytes = cost.bytes if push_bytes is None else push_bytes
    runs = backward_runs(cost.layers, bucket_bytes, most_buckets)
    shrink = push_bytes / cost.bytes if cost.bytes else 0.0

    made = StepDraft()
    from_servers = made.resource("servers' link out", copies=servers, rate=server_link, shared=True)
    to_servers = made.resource("servers' link in", copies=servers, rate=server_link, shared=True)
    servers_core = made.resource("servers' core", copies=servers)
    together = hosts is not None and hosts < replicas
    ins, outs = [], []
    for host in range(hosts or replicas):
        # A replica alone on its host has one transfer under way at a time, each way.
        ins.append(made.resource("host's link in", host, rate=link, shared=together))
        outs.append(made.resource("host's link out", host, rate=link, shared=together))
    for replica in range(replicas):
        host = replica * (hosts or replicas) // replicas
        core = made.resource("replica's core", replica)
        if cost.input_s:
            feed = made.resource("replica's input", replica)
            made.piece("load", "input", replica, [feed], seconds=cost.input_s)
        asked = [made.piece("ask", "exchange", replica, [servers_core], seconds=message_s)] if message_s else []
        way = [ins[host], from_servers]
        pulled = made.piece("pull", "exchange", replica, way, seconds=2 * latency_s, bytes=pull_bytes, after=asked)
        computed = made.piece("forward", "compute", replica, [core], seconds=cost.forward_s, after=[pulled])
        pushed: list[int] = []
        for run in runs:
            computed = made.piece("backward", "compute", replica, [core], seconds=run.seconds, after=[computed])
            size = run.bytes * shrink
            before = [computed, *pushed[-1:]] if together else [computed]
            way = [outs[host], to_servers]
            pushed.append(made.piece("push", "exchange", replica, way, seconds=latency_s, bytes=size, after=before))
        made.piece("report", "exchange", replica, [servers_core], seconds=message_s, after=[computed, *pushed])
    before = []
    if cost.sum_s:
        seconds = accepted * cost.sum_s / servers
        before = [made.piece("sum", "update", CLOSING, [servers_core], seconds=seconds)]
    if cost.update_s:
        seconds = cost.update_s / servers
        before = [made.piece("update", "update", CLOSING, [servers_core], seconds=seconds, after=before)]
    if latency_s:
        made.piece("answer", "exchange", CLOSING, [], seconds=2 * latency_s, after=before)
    strategy = f"{replicas} replicas, {servers} {'server' if servers == 1 else 'servers'}, {rule.words}"
    if rule.is_async:
        return made.step(strategy, replicas, "each", bound=rule.bound)
    return made.step(strategy, replicas, "all" if accepted == replicas else accepted)


def _accepted(rule: Rule, replicas: int) -> int:
    """Returns how many turns make a step."""
    if rule.is_async:
        return 1
    if isinstance(rule.accept, str):
        raise InvalidInput("accept", rule.accept, "give a number to simulate")
    return replicas if rule.accept is None else rule.accept
