"""A strategy is a value that answers for itself, and knows the flags that mean it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.cli import Parser, run
from paceline.cli.run_plan import resolve
from paceline.errors import StrategyError
from paceline.exchange.wire_names import WIRES
from paceline.rules import Async, Rule, Sync
from paceline.split.values import SCHEDULES, Layout, Split, Stages, Tiles, Wavefront
from paceline.strategy import BATCHNORMS, DURABILITIES, EXCHANGES, SERVER_EXCHANGES, Centralized, Mirrored, Strategy

COUNTS = st.integers(1, 40)
FACTORS = st.floats(1e-6, 1e6)
NAMES = st.sampled_from(["data", "model", "rows", "hidden", "embed", "blocks.1.fc", "π"])


@st.composite
def layouts(draw: Any, replicas: int) -> Layout:
    mesh = draw(st.dictionaries(st.sampled_from(["model", "x", "y"]), st.integers(1, 4), min_size=1))
    dims = draw(st.dictionaries(NAMES, st.sampled_from(sorted(mesh)), min_size=1))
    if draw(st.booleans()):
        mesh["data"], dims["batch"] = replicas, "data"
    return Layout(mesh=mesh, layout=dims)


@st.composite
def stages(draw: Any) -> Stages:
    count = draw(st.integers(1, 6))
    cut_at = draw(st.just(()) | st.tuples(*[NAMES] * (count - 1)))
    return Stages(
        stages=count, micro_batches=draw(COUNTS), schedule=draw(st.sampled_from(SCHEDULES)), cut_at=tuple(cut_at)
    )


def splits(replicas: int) -> st.SearchStrategy[Split | None]:
    tiles = st.builds(Tiles, rows=st.integers(1, 4), columns=st.integers(1, 4))
    return st.none() | layouts(replicas) | stages() | tiles | st.builds(Wavefront, parts=COUNTS, time_block=COUNTS)


def rules(replicas: int) -> st.SearchStrategy[Rule]:
    numbers = st.integers(0, 50)
    stale = st.sampled_from(["keep", "scale", "compensate", "compensate:0.25"]) | numbers.map("drop:{}".format)
    return st.builds(Sync, st.none() | st.just("auto") | st.integers(1, replicas)) | st.builds(
        Async, bound=st.none() | numbers, stale=stale, lr=FACTORS
    )


@st.composite
def any_strategy(draw: Any) -> Strategy:
    replicas = draw(COUNTS)
    common = {"replicas": replicas, "timeout_s": draw(FACTORS)}
    split = draw(splits(replicas))
    if draw(st.booleans()):
        matrices = ["powersgd:4"] if split is None else []
        return Mirrored(
            **common,
            wire=draw(st.sampled_from([*WIRES, "topk:0.01", *matrices])),
            batchnorm=draw(st.sampled_from(BATCHNORMS)),
            exchange=draw(st.sampled_from(EXCHANGES)) if split is None else "auto",
            split=split,
            table_servers=draw(st.integers(0, 5)) if split is None else 0,
        )
    servers = draw(COUNTS)
    return Centralized(
        **common,
        wire=draw(st.sampled_from(WIRES)),
        servers=servers,
        rule=draw(rules(replicas)),
        exchange=draw(st.sampled_from(SERVER_EXCHANGES)),
        durability=draw(st.sampled_from(DURABILITIES if servers > 1 else DURABILITIES[:2])),
        warmup_steps=draw(st.integers(0, 9)),
        warmup_epochs=draw(st.integers(0, 9)),
        in_graph=split is None and draw(st.booleans()),
        split=split,
    )


@given(any_strategy())
def test_the_flags_of_a_strategy_give_the_same_strategy_back(strategy: Strategy) -> None:
    parser = Parser("paceline run")
    run.add_arguments(parser)
    options = parser.parse(["train.py", *strategy.flags()])
    options.arguments = None
    assert resolve(options).strategy == strategy


@given(any_strategy())
def test_a_strategy_survives_the_way_to_a_replica(strategy: Strategy) -> None:
    assert msgspec.json.decode(msgspec.json.encode(strategy), type=Strategy) == strategy


def test_a_strategy_says_what_has_to_be_started() -> None:
    cut = Stages(stages=3)
    for strategy, processes, servers, on_servers in [
        (Mirrored(replicas=2), 2, 0, False),
        (Mirrored(replicas=2, split=cut), 6, 0, False),
        (Mirrored(replicas=2, table_servers=3), 2, 3, False),
        (Centralized(replicas=2, servers=4), 2, 4, True),
        (Centralized(replicas=2, split=cut), 6, 1, True),
        (Centralized(replicas=5, in_graph=True), 1, 1, True),
    ]:
        assert (strategy.processes, strategy.server_processes, strategy.on_servers) == (processes, servers, on_servers)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Mirrored(replicas="two"), "replicas is 'two': give a whole number from 1 up"),  # type: ignore[arg-type]
        (lambda: Mirrored(timeout_s=float("inf")), "timeout is inf: give a number of seconds above 0"),
        (
            lambda: Mirrored(split=Layout(mesh={"data": 2}, layout={"batch": "data"})),
            "replicas is 1: the batch is divided into 2 by mesh data=2, layout batch=data, give as many",
        ),
        (lambda: Centralized(replicas=2, rule=Sync(3)), "accept is 3: give at most the number of replicas, which is 2"),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused_with_what_would(make: Any, sentence: str) -> None:
    with pytest.raises(StrategyError) as caught:
        make()
    assert str(caught.value) == sentence


def test_nobody_asks_a_strategy_or_a_rule_for_its_type() -> None:
    """In the rooms of starting and comparing: they ask it a question, which it answers."""
    package = Path(paceline.__file__).parent
    paths = [path for room in ("cli", "launch", "verify", "watch") for path in (package / room).rglob("*.py")]
    for path in [*paths, package / "run_place.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr", "getattr")
            subject = ast.unparse(node) if asks else ""
            assert not any(word in subject for word in ("strategy", "rule", "Mirrored", "Sync", "Async")), (
                path,
                subject,
            )
