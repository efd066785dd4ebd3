"""Cells that repeat in time are found in a graph, whatever is between them, and dealt out so that there are waves."""

from __future__ import annotations

import pytest
import torch
from cell_models import MODELS, WORDS, Stack, loss
from torch import fx, nn

from paceline.errors import InvalidInput
from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import capture
from paceline.split.wavefront.cells import Cells, find_cells
from paceline.split.wavefront.dependencies import Dependencies
from paceline.split.wavefront.placement import Placement, Stacks
from paceline.split.wavefront.random_order import RandomOrder

STEPS = 6


def found(model: nn.Module) -> tuple[CallGraph, Dependencies, Cells]:
    call = capture(loss, model, torch.zeros(2, STEPS + 1, dtype=torch.int64))
    dependencies = Dependencies(call)
    return call, dependencies, find_cells(call, dependencies)


@pytest.mark.parametrize(
    ("model", "stacks", "times"),
    [
        ("LSTM cells", [[0, 1, 2]], [(0, STEPS - 1)] * 3),
        ("handmade", [[0, 1, 2, 3]], [(0, STEPS - 1)] * 3),  # and the choice of words, on top
        # Two directions, then a decoder: it begins with what the encoder's last step has left.
        ("attending", [[0, 1], [2, 3, 4]], [(0, STEPS - 1)] * 2 + [(STEPS - 1, 2 * STEPS - 2)] * 2),
        ("fed back", [[0, 1], [2, 3]], [(0, STEPS - 1)] * 2 + [(STEPS - 1, 2 * STEPS - 2)]),
    ],
)
def test_layers_are_cells_that_do_not_depend_on_those_above(
    model: str, stacks: list[list[int]], times: list[tuple[int, int]]
) -> None:
    call, dependencies, cells = found(MODELS[model]())
    assert Stacks(call, cells, dependencies).of_layers == stacks
    assert [(layer.begin, layer.end) for layer in cells.layers] == times


def test_a_model_without_a_loop_has_no_layers() -> None:
    _, _, cells = found(nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, WORDS)))
    assert cells.layers == []


def test_every_device_has_its_cells_of_every_block() -> None:
    call, dependencies, cells = found(Stack(nn.LSTMCell, 2))
    dealt = Stacks(call, cells, dependencies).deal([1.0] * len(call.nodes), 2)
    of_kind = {kind: dealt[number] for number, layer in enumerate(cells.layers) for kind in layer.kinds}
    placement = Placement(call, cells, dependencies, of_kind, 2, time_block=2)
    blocks = STEPS // 2
    assert placement.count == 2 * blocks
    used: dict[int, list[fx.Node]] = {}
    for node in call.nodes:
        assert all(placement.task_of[source] <= placement.task_of[node] for source in dependencies.before[node])
        if "lstm_cell" in str(node.target):
            used.setdefault(placement.task_of[node], []).append(node)
    # Two steps of one layer in each task, so that device 0 is at a block while device 1 is at the one before.
    assert {task: len(nodes) for task, nodes in used.items()} == dict.fromkeys(range(2 * blocks), 2)
    for task, nodes in used.items():
        assert {node.meta["modules"][-1] for node in nodes} == {f"cells.{task % 2}"}


def test_what_draws_by_values_is_refused_with_a_sentence() -> None:
    call, _, _ = found(nn.Sequential(nn.Embedding(WORDS, 4), nn.RReLU(), nn.Linear(4, WORDS)))
    with pytest.raises(InvalidInput, match="wavefront is 'rrelu': how many random numbers it draws depends on values"):
        RandomOrder(call, lambda node: True)
