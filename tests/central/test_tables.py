"""Tables: rows where they belong, and lazy optimizers that do to them what torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.central.shards import plain_options, restored_options
from paceline.central.tables.embedding import find_tables
from paceline.central.tables.tables import Dealt, Rows, Table, TableSpec
from paceline.errors import ArenaError, ModelError

ROWS, WIDTH = 11, 3


def gradients(steps: int) -> list[Rows]:
    """For each step a few rows, some of them twice."""
    random = torch.Generator().manual_seed(5)
    return [
        Rows(torch.randint(ROWS, (6,), generator=random), torch.randn(6, WIDTH, generator=random)) for _ in range(steps)
    ]


def new_table(optimizer: str, weight: torch.Tensor | None = None) -> Table:
    table = Table(TableSpec("table", ROWS, WIDTH, 0, False), optimizer, {}, 0, 1)
    if weight is not None:
        table.put("", 0, weight)
    return table


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("lazy", "torchs"),
    [
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.3)),
        ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.3, lr_decay=0.1, initial_accumulator_value=0.2)),
        ("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.3)),
        ("Adam", lambda p: torch.optim.SparseAdam(p, lr=0.3, betas=(0.8, 0.95))),
    ],
)
def test_rows_are_updated_as_torch_updates_them(
    lazy: str, torchs: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(weight.clone())
    optimizer = torchs([parameter])
    table = new_table(lazy, weight)
    options = restored_options(plain_options(optimizer.param_groups[0]))
    for rows in gradients(7):
        parameter.grad = torch.sparse_coo_tensor(
            rows.ids[None], rows.values, (ROWS, WIDTH), check_invariants=True
        ).coalesce()
        optimizer.step()
        table.update([(rows, 1.0)], options, 1.0)
    assert torch.allclose(table.weight, parameter.detach(), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam", "AdamW"])
def test_a_row_without_a_gradient_stays_as_it_is(optimizer: str) -> None:
    options = {
        "lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8,
    }  # fmt: skip
    table = new_table(optimizer, torch.ones(ROWS, WIDTH))
    table.update([(Rows(torch.tensor([2, 4]), torch.ones(2, WIDTH)), 1.0)], options, 1.0)
    changed = (table.weight != 1).any(1).nonzero().view(-1).tolist()
    assert changed == [2, 4]


def test_replicas_gradients_for_the_same_row_are_added_with_their_weights() -> None:
    table = new_table("SGD", torch.zeros(ROWS, WIDTH))
    one = Rows(torch.tensor([1, 3]), torch.ones(2, WIDTH))
    other = Rows(torch.tensor([3, 3]), torch.ones(2, WIDTH))
    table.update([(one, 0.25), (other, 0.75)], {"lr": 1.0}, 1.0)
    assert table.weight[:, 0].tolist() == [0, -0.25, 0, -1.75, *[0.0] * (ROWS - 4)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), max_size=30), st.integers(1, 5))
def test_rows_are_dealt_to_the_server_that_has_them(rows: list[int], servers: int) -> None:
    dealt = Dealt.out(torch.tensor(rows, dtype=torch.int64), servers)
    found = {}
    for server, (ids, places) in enumerate(zip(dealt.ids, dealt.places, strict=True)):
        for number, place in zip(ids.tolist(), places.tolist(), strict=True):
            found[place] = number * servers + server
    assert [found[place] for place in range(len(rows))] == rows


def test_servers_draw_the_values_of_a_table_nobody_has() -> None:
    spec = TableSpec("table", 1000, 8, 0, True)
    one, again, other = (Table(spec, "SGD", {}, server, 2).weight for server in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (500, 8)
    assert abs(float(one.std()) - 1) < 0.1


def test_memory_comes_with_the_rows_that_are_used() -> None:
    """640 MB of rows and as many of state, of which a step touches a few."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    table = Table(TableSpec("table", 10_000_000, 16, 0, False), "Adagrad", {}, 0, 1)
    rows = Rows(torch.arange(0, 10_000_000, 100_000), torch.ones(100, 16))
    table.update([(rows, 1.0)], {"lr": 0.1}, 1.0)
    assert resident() - before < 50 << 20


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Embedding(4, 2, sparse=True, max_norm=1.0), "a table on servers has neither max_norm nor"),
        (lambda: nn.Embedding(4, 2, sparse=True, dtype=torch.float64), "a table on servers is of type float32"),
    ],
)
def test_what_a_table_cannot_do_is_said(make: Callable[[], nn.Module], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        find_tables(nn.Sequential(make()))


def test_a_weight_with_two_users_is_refused() -> None:
    table, output = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 4, bias=False)
    output.weight = table.weight
    with pytest.raises(ModelError, match="another module uses it too"):
        find_tables(nn.Sequential(table, output))


def test_an_optimizer_that_is_not_lazy_is_refused() -> None:
    with pytest.raises(ModelError, match="optimizer is 'RMSprop': tables are updated by SGD, Adagrad, Adam, AdamW"):
        new_table("RMSprop")


def test_a_table_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ArenaError, match="the rows of table on this server need"):
        Table(TableSpec("table", 1 << 40, 16, 0, False), "SGD", {}, 0, 1)


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [("SGD", "dampening"), ("Adam", "amsgrad"), ("Adam", "decoupled_weight_decay"), ("AdamW", "amsgrad")],
)
def test_an_option_that_rows_are_not_updated_with_is_refused(optimizer: str, option: str) -> None:
    with pytest.raises(ModelError, match=f"{optimizer}\\({option}=True\\)"):
        Table(TableSpec("table", 4, 2, 0, False), optimizer, {option: True}, 0, 1)
