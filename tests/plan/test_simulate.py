"""The simulator against closed forms, where there are any."""

import math
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidInput
from paceline.plan.compute_times import Fixed, Lognormal, MeasuredFactors, Stragglers
from paceline.plan.cut_step import SCHEDULES, rounds_step, stages_step
from paceline.plan.fair_links import FairLinks
from paceline.plan.mirrored_step import local_steps, mirrored_step
from paceline.plan.servers_step import servers_step
from paceline.plan.simulate import simulate
from paceline.plan.step import LayerCost, StepCost
from paceline.rules import Async, Sync

COMPUTE_ONLY = StepCost.whole(0.3, 0)
counts = st.integers(1, 12)
seconds = st.floats(0.001, 10)


# ── shared links ─────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=20), st.floats(1, 1e9), st.floats(1, 1e9))
def test_a_link_is_never_idle_while_something_is_under_way(sizes: list[float], capacity: float, limit: float) -> None:
    links = FairLinks([capacity])
    for flow, size in enumerate(sizes):
        links.begin(0.0, flow, size, limit, (0,))
    done: list[int] = []
    at = 0.0
    while (next_at := links.next_over()) < math.inf:
        at = next_at
        done += links.over(at)
    assert [sizes[flow] for flow in done] == sorted(sizes)
    if limit * len(sizes) <= capacity:
        assert at == pytest.approx(max(sizes) / limit)
    elif limit >= capacity:
        assert at == pytest.approx(sum(sizes) / capacity)
    assert at >= max(sum(sizes) / capacity, max(sizes) / limit) * (1 - 1e-9)


def test_what_a_flow_cannot_use_others_get() -> None:
    """Two flows over link 0; one of them also crosses link 1, which is narrow and carries a third."""
    links = FairLinks([10.0, 4.0])
    links.begin(0.0, 0, 80.0, math.inf, (0,))  # gets 10 - 2
    links.begin(0.0, 1, 20.0, math.inf, (0, 1))  # half of link 1
    links.begin(0.0, 2, 20.0, math.inf, (1,))
    assert links.next_over() == pytest.approx(10.0)
    assert sorted(links.over(10.0)) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(1, 50), st.integers(0, 2)), min_size=1, max_size=15),
    st.floats(1, 30),
    st.lists(st.floats(1, 30), min_size=3, max_size=3),
)
def test_a_leaf_is_a_link_like_any_other(
    flows: list[tuple[float, float, int]], pool: float, hosts: list[float]
) -> None:
    """Flows of three hosts to one pool: as leaves, which is quick, and as what they are."""

    def ends(leaves: bool) -> dict[int, float]:
        links = FairLinks([*hosts, pool])
        found: dict[int, float] = {}
        coming = sorted((begins, number) for number, (begins, _, _) in enumerate(flows))
        while coming or links.next_over() < math.inf:
            if coming and coming[0][0] <= links.next_over():
                at, number = coming.pop(0)
                _, size, host = flows[number]
                way = {"links": (3,), "leaf": host} if leaves else {"links": (host, 3)}
                links.begin(at, number, size, math.inf, **way)  # type: ignore[arg-type]
            else:
                at = links.next_over()
                found.update(dict.fromkeys(links.over(at), at))
        return found

    assert ends(leaves=True) == pytest.approx(ends(leaves=False))


# ── pipelines and rounds ─────────────────────────────────────────────────────────────────────────────────


@given(counts, counts, st.sampled_from(SCHEDULES), seconds, seconds)
@settings(deadline=None)
def test_the_bubble_of_a_pipeline(stages: int, micro: int, schedule: str, forward_s: float, backward_s: float) -> None:
    found = simulate(stages_step([(forward_s, backward_s)] * stages, micro_batches=micro, schedule=schedule))
    assert found.step_s == pytest.approx((micro + stages - 1) * (forward_s + backward_s))
    assert found.use("device's core").busy == pytest.approx(micro / (micro + stages - 1))


def test_the_slowest_stage_sets_the_pace_and_is_said_to_bind() -> None:
    found = simulate(stages_step([(1, 2), (2, 4), (1, 2)], micro_batches=64))
    assert found.step_s == pytest.approx(64 * 6, rel=0.05)
    assert found.use("device's core").busiest > 0.95


@given(counts, st.lists(st.tuples(seconds, st.floats(0, 1e6)), min_size=1, max_size=8))
@settings(deadline=None)
def test_devices_in_rounds_take_the_sum_of_their_rounds(devices: int, rounds: list[tuple[float, float]]) -> None:
    found = simulate(rounds_step(rounds, devices=devices, link=1e6))
    exchange_s = sum(size / 1e6 for _, size in rounds) if devices > 1 else 0.0
    assert found.step_s == pytest.approx(sum(compute for compute, _ in rounds) + exchange_s)


# ── parameters on servers ────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 60), st.integers(1, 20), st.floats(1e3, 1e9), st.floats(1e6, 1e10))
@settings(deadline=None)
def test_servers_or_the_replicas_own_links_bind(replicas: int, servers: int, size: float, link: float) -> None:
    found = simulate(
        servers_step(StepCost.whole(0, size), replicas=replicas, servers=servers, link=link, push_bytes=0.0)
    )
    assert found.step_s == pytest.approx(max(size / link, replicas * size / (servers * link)))
    assert found.use("servers' link out").bytes_a_step == pytest.approx(replicas * size / servers)
    if replicas > 1.1 * servers:
        assert found.binds == "servers' link out"
        assert found.use(found.binds).busy == pytest.approx(1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_replicas_of_a_host_share_its_link(hosts: int, a_host: int, servers: int) -> None:
    step = servers_step(
        StepCost.whole(0, 1e6), replicas=hosts * a_host, servers=servers, hosts=hosts, link=1e6, push_bytes=0.0
    )
    assert simulate(step).step_s == pytest.approx(max(a_host, hosts * a_host / servers))


@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_a_step_closes_with_the_kth_of_n(replicas: int, data: st.DataObject) -> None:
    accept, seed = data.draw(st.integers(1, replicas)), data.draw(st.integers(0, 1000))
    times = Lognormal(0.5)
    drawn = np.sort(times.draw(np.random.default_rng(seed), 4096)[:replicas])
    step = servers_step(COMPUTE_ONLY, replicas=replicas, servers=1, rule=Sync(accept))
    found = simulate(step, times=times, steps=1, seed=seed, warm_up=0)
    assert found.step_s == pytest.approx(0.3 * drawn[accept - 1])


def test_a_sync_step_waits_for_the_slowest_of_all_and_says_so() -> None:
    replicas, steps = 20, 400
    times = Stragglers(0.1, chance=0.05, least=3.0)
    drawn = times.draw(np.random.default_rng(7), 4096)
    drawn = np.concatenate([drawn, times.draw(np.random.default_rng(7), 4096)])  # a second lot is drawn after it
    step = servers_step(COMPUTE_ONLY, replicas=replicas, servers=1)
    found = simulate(step, times=times, steps=200, seed=7)
    slowest = drawn[: 200 * replicas].reshape(200, replicas).max(axis=1)
    assert found.step_s == pytest.approx(0.3 * slowest.mean())
    assert found.median_s == pytest.approx(0.3 * np.median(slowest))
    assert found.path["wait"] == pytest.approx(1 - times.mean / slowest.mean(), rel=0.02)
    assert sum(found.path.values()) == pytest.approx(1)
    assert steps > found.steps == 200


def test_one_slow_replica_costs_nothing_when_a_step_need_not_wait_for_it() -> None:
    def of(rule: Sync) -> float:
        step = servers_step(COMPUTE_ONLY, replicas=10, servers=2, rule=rule)
        found = simulate(step, slow={3: 5.0}, steps=40)
        assert (found.late > 0) == (rule.accept is not None)
        return found.step_s

    assert of(Sync()) == pytest.approx(1.5)
    assert of(Sync(9)) == pytest.approx(0.3)


@given(st.integers(1, 30))
@settings(deadline=None)
def test_staleness_of_equal_replicas_is_one_less_than_there_are(replicas: int) -> None:
    found = simulate(servers_step(COMPUTE_ONLY, replicas=replicas, servers=2, rule=Async()), steps=10)
    assert found.staleness is not None
    assert found.staleness.mean == pytest.approx(replicas - 1)
    assert found.turns_per_s == pytest.approx(replicas / 0.3)


def test_a_bound_holds_the_fast_ones_back() -> None:
    def turns_per_s(bound: int | None) -> float:
        step = servers_step(COMPUTE_ONLY, replicas=4, servers=1, rule=Async(bound=bound))
        return simulate(step, slow={0: 10.0}, steps=50).turns_per_s

    assert turns_per_s(0) == pytest.approx(4 / 3.0, rel=0.05)
    assert turns_per_s(None) == pytest.approx(3 / 0.3 + 1 / 3.0, rel=0.05)


def test_async_is_as_fast_as_what_servers_can_update() -> None:
    cost = StepCost.whole(0.3, 0, sum_s=0.04, update_s=0.06)
    found = simulate(servers_step(cost, replicas=16, servers=2, rule=Async()), times=Lognormal(0.3), steps=40)
    assert found.step_s == pytest.approx(0.05, rel=0.01)
    assert found.binds == "servers' core"
    assert found.use("servers' core").busy == pytest.approx(1, rel=0.01)


# ── mirrored replicas ────────────────────────────────────────────────────────────────────────────────────


@given(counts, seconds, seconds, seconds)
@settings(deadline=None)
def test_owners_of_one_host_divide_the_update(replicas: int, compute_s: float, sum_s: float, update_s: float) -> None:
    cost = StepCost.whole(compute_s, 1e6, sum_s=sum_s, update_s=update_s)
    found = simulate(mirrored_step(cost, replicas=replicas, meet_s=0.001))
    assert found.step_s == pytest.approx(compute_s + ((replicas - 1) * sum_s + update_s) / replicas + 0.001)


@given(st.integers(2, 12), st.integers(1, 4), st.floats(1e3, 1e8), st.sampled_from([1.0, 0.5]))
@settings(deadline=None)
def test_a_gradient_crosses_a_hosts_link_twice(hosts: int, here: int, size: float, wire: float) -> None:
    step = mirrored_step(
        StepCost.whole(0.3, size), replicas=hosts * here, hosts=hosts, link=1e6, wire=wire, bucket_bytes=1e9
    )
    found = simulate(step)
    crossing = 2 * (hosts - 1) / hosts * size * wire
    assert found.step_s == pytest.approx(0.3 + crossing / 1e6)
    assert found.use("hosts' links").bytes_a_step == pytest.approx(crossing)


@given(st.integers(2, 8), st.lists(st.tuples(seconds, st.floats(1, 1e7)), min_size=1, max_size=12))
@settings(deadline=None)
def test_overlap_hides_at_most_the_shorter_of_the_two(hosts: int, layers: list[tuple[float, float]]) -> None:
    cost = StepCost(tuple(LayerCost(backward_s / 2, backward_s, size) for backward_s, size in layers))
    found = simulate(mirrored_step(cost, replicas=hosts, hosts=hosts, link=1e6, bucket_bytes=1e6))
    exchange_s = 2 * (hosts - 1) / hosts * cost.bytes / 1e6
    assert found.step_s <= (cost.compute_s + exchange_s) * (1 + 1e-9)
    # The gradients of the first layer are complete last, and have still to go.
    assert found.step_s >= max(cost.compute_s, cost.forward_s + exchange_s) * (1 - 1e-9)


def test_buckets_that_travel_while_backward_runs_are_hidden_but_for_the_last() -> None:
    cost = StepCost((LayerCost(0.1, 0.2, 1e6),) * 10)
    found = simulate(mirrored_step(cost, replicas=2, hosts=2, link=1e7, bucket_bytes=1e6))
    assert found.step_s == pytest.approx(3.0 + 0.1)


@given(counts, st.integers(1, 6), st.integers(1, 3))
@settings(deadline=None)
def test_local_steps_exchange_once_for_all(every: int, hosts: int, here: int) -> None:
    cost = StepCost.whole(0.3, 1e6, update_s=0.02)
    found = simulate(local_steps(cost, every=every, replicas=hosts * here, hosts=hosts, link=1e6))
    assert found.step_s == pytest.approx(every * 0.32 + 2 * (hosts - 1) / hosts)
    assert found.turns_per_s == pytest.approx(every * hosts * here / found.step_s)


def test_input_that_is_slower_than_computing_binds() -> None:
    found = simulate(mirrored_step(StepCost.whole(0.1, 0, input_s=0.4), replicas=3))
    assert found.step_s == pytest.approx(0.4)
    assert found.binds == "replica's input"
    assert found.path == {"input": pytest.approx(1.0), "update": 0.0, "wait": 0.0}


# ── all of it ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", [Sync(), Sync(480), Async()], ids=lambda rule: rule.words)
def test_500_replicas_on_16_servers_take_seconds(rule: Sync | Async) -> None:
    """Events are counted since a machine may be busy; they take about 7 µs each."""
    cost = StepCost.whole(0.3, 100e6, layers=16, sum_s=0.001, update_s=0.001)
    began = time.process_time()
    step = servers_step(cost, replicas=500, servers=16, link=1.25e9, rule=rule, most_buckets=4, latency_s=1e-4)
    found = simulate(step, times=Lognormal(0.2), steps=30)
    assert found.events < 500 * 12 * 40
    assert time.process_time() - began < 5
    assert found.step_s * (1 if isinstance(rule, Sync) else 500) == pytest.approx(500 * 100e6 / (16 * 1.25e9), rel=1.2)


def test_the_same_seed_gives_the_same_run() -> None:
    step = servers_step(StepCost.whole(0.3, 1e6), replicas=6, servers=2, link=1e7, rule=Async())
    times = MeasuredFactors.of([0.2, 0.3, 0.31, 0.5])
    first, again, other = (simulate(step, times=times, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.low_s < first.median_s < first.high_s
    assert 0 < first.error_s < first.step_s


def test_means_of_compute_times_are_what_they_say() -> None:
    random = np.random.default_rng(3)
    for times in (Fixed(), Lognormal(0.4), Stragglers(0.1, 0.1, 2.0, 4.0), MeasuredFactors((1.0, 2.0))):
        assert times.draw(random, 400_000).mean() == pytest.approx(times.mean, rel=0.01)


def test_nothing_here_imports_torch() -> None:
    names = ("simulate", "servers_step", "mirrored_step", "cut_step")
    code = f"import sys; from paceline.plan import {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: servers_step(COMPUTE_ONLY, replicas=0, servers=1), "give at least 1"),
        (lambda: servers_step(COMPUTE_ONLY, replicas=4, servers=1, hosts=5), "hosts is 5: give 1 to 4"),
        (lambda: servers_step(COMPUTE_ONLY, replicas=4, servers=1, rule=Sync(5)), "accept is 5"),
        (lambda: servers_step(COMPUTE_ONLY, replicas=4, servers=1, rule=Sync("auto")), "give a number"),
        (lambda: servers_step(COMPUTE_ONLY, replicas=4, servers=1, link=0.0), "give a rate above 0"),
        (lambda: mirrored_step(COMPUTE_ONLY, replicas=5, hosts=2), "as many replicas to every host"),
        (lambda: local_steps(COMPUTE_ONLY, every=0, replicas=2), "every is 0"),
        (lambda: stages_step([(1, 2)], micro_batches=2, schedule="zb"), "one of 1f1b, gpipe"),
        (lambda: stages_step([(-1, 2)], micro_batches=2), "seconds and bytes from 0 up"),
        (lambda: rounds_step([], devices=2), "at least 1 of each"),
        (lambda: simulate(mirrored_step(COMPUTE_ONLY, replicas=2), steps=0), "steps is 0"),
        (lambda: simulate(mirrored_step(COMPUTE_ONLY, replicas=2), slow={2: 5.0}), "give a replica from 0 to 1"),
        (lambda: Lognormal(-1), "spread is -1"),
        (lambda: Stragglers(0.1, 2.0), "chance is 2.0"),
        (lambda: MeasuredFactors(()), "at least one"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_sentence(refused: object, said: str) -> None:
    assert callable(refused)
    with pytest.raises(InvalidInput, match=said):
        refused()
