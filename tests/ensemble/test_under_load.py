"""The benchmark's load, for a moment: no request fails when a member sleeps or is killed. Never how fast that is."""

from __future__ import annotations

import pytest

from benchmarks.ensembles import killed, late, print_seeds, seeds


def test_two_of_three_answer_while_the_third_sleeps() -> None:
    load = late(duration_s=0.5, timeout_s=10.0, sleep_s=60.0)  # long for a busy machine; waiting costs nothing
    assert load.failures == []
    assert dict(load.members) == {2: 10}
    assert min(load.seconds) >= 10.0  # the third was waited for


def test_members_killed_under_load_come_back() -> None:
    load, away = killed(duration_s=2.0, timeout_s=20.0, every_s=0.5)
    assert load.failures == []
    assert len(away) >= 1
    assert set(load.members) <= {2, 3}
    assert sum(load.members.values()) == 40


def test_the_table_over_seeds_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    print_seeds(seeds((8, 8), count=2, epochs=2))
    heading, *rows, verdict = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "seed"
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "over all seeds" in verdict
