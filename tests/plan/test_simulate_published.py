"""The simulator beside figures it was not fitted to: others' published ones, and runs of our own."""

import pytest

from benchmarks.saturation import DOCS, null_cluster, null_steps, own_runs


def test_16_servers_and_100_workers_take_about_what_was_published() -> None:
    found = null_steps(null_cluster())
    for name, within in (("dense, 100 MB", 0.05), ("dense, 1 GB", 0.15)):
        assert found.ours[name][-1] == pytest.approx(found.theirs[name][100], rel=within)
    # Up to as many workers as servers each has its own link to itself; from there on all share those of the servers.
    one, sixteen, fifty, hundred = (found.ours["dense, 1 GB"][found.workers.index(n)] for n in (1, 16, 50, 100))
    assert sixteen == pytest.approx(one, rel=0.01)
    assert hundred == pytest.approx(2 * fifty, rel=0.01)


def test_runs_with_a_slow_replica_take_what_was_measured() -> None:
    """One number is fitted, to three healthy replicas; accept, sync and async follow from the description of a step."""
    for name, (measured, simulated) in own_runs(DOCS).samples_per_s.items():
        assert simulated == pytest.approx(measured, rel=0.03), name
