"""Rules as values: what they say, what they refuse, and that they travel."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import StrategyError
from paceline.rules import DEFAULT_COMPENSATION, Async, Rule, Sync


@given(st.integers(0, 1000))
def test_a_stale_gradient_counts_as_its_policy_says(staleness: int) -> None:
    assert Async().weight(staleness) == Async(stale="drop:3").weight(staleness) == 1.0
    assert Async(stale="scale").weight(staleness) == (1 / staleness if staleness > 1 else 1.0)


def test_only_drop_drops_and_only_compensate_compensates() -> None:
    policies = ["keep", "drop:0", "drop:8", "scale", "compensate", "compensate:0.5"]
    assert [Async(stale=policy).drop_beyond for policy in policies] == [math.inf, 0, 8, math.inf, math.inf, math.inf]
    assert [Async(stale=policy).compensation for policy in policies] == [0, 0, 0, 0, DEFAULT_COMPENSATION, 0.5]


@pytest.mark.parametrize(
    "rule",
    [Sync(), Sync(3), Sync("auto"), Async(), Async(bound=0), Async(bound=2, stale="drop:4", lr=0.5)],
)
def test_a_rule_travels(rule: Rule) -> None:
    assert msgspec.json.decode(msgspec.json.encode(rule), type=Rule) == rule
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=Rule) == rule
    assert hash(rule) == hash(msgspec.structs.replace(rule))


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (Sync, {"accept": 0}, "accept is 0: give at least 1"),
        (Sync, {"accept": "most"}, "accept is 'most': give a number of replicas, or auto"),
        (Async, {"bound": -1}, "bounded is -1: give a number of steps from 0 up"),
        (Async, {"lr": 0.0}, "stale-lr is 0.0: give a factor above 0, such as 0.5"),
        (Async, {"lr": math.nan}, "stale-lr is nan: give a factor above 0, such as 0.5"),
        *(
            (Async, {"stale": text}, f"stale is {text!r}: give one of keep, drop:N, scale, compensate")
            for text in ("", "discard", "keep:1", "scale:2", "keep:")
        ),
        *(
            (Async, {"stale": text}, f"stale is {text!r}: give drop:N with a whole number of steps, such as drop:8")
            for text in ("drop", "drop:", "drop:-1", "drop:1.5", "drop:²")
        ),
        *(
            (Async, {"stale": text}, f"stale is {text!r}: give compensate:LAMBDA with a number above 0")
            for text in ("compensate:", "compensate:0", "compensate:-1", "compensate:inf", "compensate:much")
        ),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_what_would(
    kind: Any, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(StrategyError) as caught:
        kind(**fields)
    assert str(caught.value).startswith(sentence)
