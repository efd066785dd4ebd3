"""A wavefront gives what one process gives: outputs, final states, every gradient, whatever the module is like."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cell_models import MODELS, Stack, loss
from conftest import MAIN, Run, Start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from paceline.errors import InvalidInput
from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES, DESCRIPTORS, Peers
from paceline.memory.arena import Arena
from paceline.split.balance import even_bounds
from paceline.split.cut import call_model
from paceline.split.values import Wavefront
from paceline.split.wavefront import WavefrontCut

MOST_DEVICES = 3
CLOSE = {"float64": 1e-9, "float32": 1e-4}

Measure = Callable[[dict[str, Any]], None]


def mailboxes(count: int) -> int:
    descriptor = os.memfd_create("test-peers")
    os.ftruncate(descriptor, count * count * BOX_BYTES)
    return descriptor


@contextmanager
def devices_of(script: str, close: Mapping[str, float]) -> Iterator[Measure]:
    """Gives a function that lets real processes compute a case, and fails unless all are close to one process."""
    board = Board.create(MOST_DEVICES, supervised=False)
    descriptors = [board.descriptor, *(mailboxes(count) for count in range(1, MOST_DEVICES + 1))]
    devices = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.launch.script",
                str(Path(__file__).with_name(script)),
                str(rank),
                *map(str, descriptors),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )
        for rank in range(MOST_DEVICES)
    ]

    def measured(case: dict[str, Any]) -> None:
        for device in devices:
            assert device.stdin is not None
            device.stdin.write(json.dumps(case) + "\n")
            device.stdin.flush()
        answers = [json.loads(device.stdout.readline()) for device in devices if device.stdout is not None]
        for rank, answer in enumerate(answers):
            assert "failed" not in answer, f"device {rank}: {answer['failed']}"
            for name, distance in answer.get("distances", {}).items():
                assert distance is not None, f"device {rank} has no {name}, or one process has none"
                assert distance < close[case["dtype"]], f"device {rank}: {name} is {distance} away"
        assert sum("distances" in answer for answer in answers) == case["devices"]

    yield measured
    for device in devices:
        device.communicate(timeout=60)
        assert device.returncode == 0
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    with devices_of("wavefront_device.py", CLOSE) as measured:
        yield measured


@pytest.fixture(scope="module")
def measure_cells() -> Iterator[Measure]:
    with devices_of("cells_device.py", {"float64": 1e-12}) as measured:
        yield measured


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["LSTM", "GRU", "RNN"]))
    devices = draw(st.integers(1, MOST_DEVICES))
    hidden, batch, length = draw(st.integers(2, 5)), draw(st.integers(0, 3)), draw(st.integers(1, 9))
    layers = draw(st.integers(max(2, devices), 5))
    lengths = st.lists(st.integers(1, length), min_size=batch, max_size=batch) if batch else st.just([])
    return {
        "kind": kind,
        "devices": devices,
        "layers": layers,
        "input": draw(st.integers(1, 6)),
        "hidden": hidden,
        "proj": draw(st.integers(0, hidden - 1)) if kind == "LSTM" else 0,
        "nonlinearity": draw(st.sampled_from(["tanh", "relu"])),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        "training": draw(st.booleans()),
        "batch": batch,  # 0: the input has no such dim
        "length": length,
        "lengths": draw(st.one_of(st.just([]), lengths)),  # none: not packed
        "time_block": draw(st.integers(1, 10)),
        "states": draw(st.booleans()),
        "states_wanted": draw(st.booleans()),
        "input_wanted": draw(st.booleans()),
        "frozen": draw(st.lists(st.integers(0, layers - 1), max_size=2, unique=True)),
        "used": draw(st.sampled_from(["output", "finals", "both"])),
        "grad": draw(st.sampled_from([True, True, True, False])),
        "dtype": draw(st.sampled_from(list(CLOSE))),
        "seed": draw(st.integers(0, 1000)),
    }


@given(case=cases())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tensor_is_that_of_one_process(measure: Measure, case: dict[str, Any]) -> None:
    measure(case)


def test_there_may_be_more_blocks_than_a_mailbox_holds(measure: Measure) -> None:
    """Nobody takes the output while all are in the middle of a wave: whoever finds no room must not keep others from
    going on."""
    case = dict.fromkeys(("bias", "training", "states", "states_wanted", "input_wanted", "grad"), True)
    sizes = {"devices": 3, "layers": 3, "input": 2, "hidden": 2, "batch": 1, "length": 2 * DESCRIPTORS, "time_block": 1}
    others = {"kind": "RNN", "nonlinearity": "tanh", "proj": 0, "dropout": 0.0, "batch_first": False, "used": "both"}
    measure({**case, **sizes, **others, "lengths": [], "frozen": [], "dtype": "float64", "seed": 0})


# ── cells in a loop ──────────────────────────────────────────────────────────────────────────────────────────

LSTM_CELLS = ["words.weight", "cells.1.weight_hh", "cells.2.weight_ih"]


@pytest.mark.parametrize(
    ("model", "devices", "time_block", "shapes", "frozen"),
    [
        ("LSTM cells", 2, 2, [(3, 7), (2, 4), (3, 7)], LSTM_CELLS),
        ("GRU cells", 3, 2, [(3, 6), (4, 2)], []),  # the second has one time step, so nothing repeats
        ("handmade", 3, 1, [(2, 4)], ["firsts"]),
        ("attending", 2, 2, [(3, 5)], []),
        ("fed back", 2, 1, [(3, 4)], []),
        ("normed", 2, 2, [(4, 5), (3, 5)], []),
    ],
)
def test_cells_in_a_loop_train_predict_and_draw_as_in_one_process(
    model: str, devices: int, time_block: int, shapes: list[tuple[int, int]], frozen: list[str], measure_cells: Measure
) -> None:
    case = {"model": model, "devices": devices, "time_block": time_block, "shapes": shapes, "frozen": frozen}
    measure_cells({**case, "dtype": "float64", "seed": 3})


# ── whole runs ───────────────────────────────────────────────────────────────────────────────────────────────

TRANSLATE = Path(__file__).with_name("translate.py")


@pytest.fixture(scope="module", params=["", pytest.param(" --cells", marks=pytest.mark.soak)])
def options(request: pytest.FixtureRequest) -> str:
    return "--dropout 0.2" + str(request.param)


@pytest.fixture(scope="module")
def one_process(start: Start, options: str) -> Run:
    return start(TRANSLATE, None, options).fine()


@pytest.fixture(scope="module")
def in_waves(start: Start, options: str) -> Run:
    return start(TRANSLATE, "--wavefront 2 --time-block 2", options).fine()


def test_an_encoder_and_decoder_with_dropout_train_as_in_one_process(one_process: Run, in_waves: Run) -> None:
    for device in range(2):
        assert in_waves.told("losses", device) == pytest.approx(one_process.told("losses"), rel=1e-5)
        assert in_waves.told("right", device) == pytest.approx(one_process.told("right"), rel=1e-5)
    expected, got = (load_file(run.folder / "end.safetensors") for run in (one_process, in_waves))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)
    in_waves.assert_nothing_left()


def test_what_was_saved_resumes_in_one_process(start: Start, options: str, in_waves: Run, tmp_path: Path) -> None:
    for path in in_waves.folder.glob("translator.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    resumed = start(TRANSLATE, None, f"{options} --resume", folder=tmp_path).fine()
    assert resumed.told("losses") == pytest.approx(in_waves.told("losses")[3:], rel=1e-5)
    assert resumed.told("right") == pytest.approx(in_waves.told("right"), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [[], ["--", "--cells"]])
def test_two_replicas_of_two_devices_are_verified(arguments: list[str], tmp_path: Path) -> None:
    flags = ["--wavefront", "2", "--replicas", "2", "--time-block", "3", "--steps", "3", "--json"]
    verified = Run(tmp_path, sys.executable, "-c", MAIN, "verify", str(TRANSLATE), *flags, *arguments).fine()
    verdict = json.loads(verified.out.splitlines()[-1])
    assert verdict["equal"]


# ── what cannot be cut ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def peers() -> Iterator[Callable[[int], Peers]]:
    """`peers(count)`: the first of so many devices, of which only this one is there."""
    made: list[Peers] = []

    def make(count: int) -> Peers:
        board = Board.create(count, supervised=False)
        made.append(Peers(Arena.of(mailboxes(count)), board, 0, 0, count, 1.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def model(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(modules)


def tied() -> nn.Module:
    found = model(low=nn.GRU(4, 4, 2), high=nn.GRU(4, 4, 2))
    found["high"].weight_hh_l1 = found["low"].weight_hh_l0
    return found


BIDIRECTIONAL = (
    "it is bidirectional, and its backward direction begins at the end of time, when all blocks of the layer below are "
    "done; make it unidirectional, or cut the model by --stages"
)
NOT_STACKED = "wavefront is 2: the model has no nn.LSTM, nn.GRU or nn.RNN of several layers (num_layers=2 or more)"
NO_CELL = ", and its graph has no cell that a loop uses again at every step either"


def in_a_row(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


class Carried(nn.Module):
    """States of all steps lie in one tensor, which every step reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(3, 3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = x.new_zeros(2, x.size(1) + 1, len(x), 3)
        for step in range(x.size(1)):
            below = x[:, step]
            for number, cell in enumerate(self.cells):
                below = cell(below, states[number, step].clone())
                states[number, step + 1] = below
        return states


@pytest.mark.parametrize(
    ("make", "parts", "sentence"),
    [
        (lambda: model(rnn=nn.LSTM(3, 4, 2, bidirectional=True)), 2, f"wavefront is 'rnn': {BIDIRECTIONAL}"),
        (
            lambda: model(low=nn.GRU(3, 4, bidirectional=True), high=nn.GRU(8, 4, 2)),
            2,
            f"wavefront is 'low': {BIDIRECTIONAL}",
        ),
        (lambda: in_a_row(fc=nn.Linear(3, 4)), 2, NOT_STACKED + NO_CELL),
        (lambda: in_a_row(rnn=nn.LSTM(3, 4)), 2, f"{NOT_STACKED}, 'rnn' has one{NO_CELL}"),
        (lambda: in_a_row(rnn=nn.LSTM(3, 4, bidirectional=True)), 2, f"wavefront is 'rnn': {BIDIRECTIONAL}"),
        (
            Carried,
            2,
            "wavefront is 'new_zeros in the model': it is changed in place in one step of a loop and read in the next; "
            "collect the steps in a list, and torch.stack them",
        ),
        (
            lambda: model(encoder=nn.LSTM(3, 4, 4), decoder=nn.RNN(3, 4, 2)),
            3,
            "wavefront is 3: 'decoder' has 2 layers, give at most that many",
        ),
        (
            tied,
            2,
            "wavefront is 'low.weight_hh_l0': it is high.weight_hh_l1 as well, and layers on several devices cannot "
            "share; give it its own",
        ),
        (
            lambda: model(rnn=nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4, 2), "weight_hh_l0")),
            2,
            "wavefront is 'rnn.weight_hh_l0': it is computed from other parameters, by weight_norm or the like; "
            "give it as one parameter",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_with_a_sentence(
    make: Callable[[], nn.Module], parts: int, sentence: str, peers: Callable[[int], Peers]
) -> None:
    cut = WavefrontCut(Wavefront(parts=parts), peers(parts))
    with pytest.raises(InvalidInput) as refused:
        cut.prepare(call_model, make(), ((torch.zeros(2, 3, 3),), {}))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("make", "layers"), [(lambda: Stack(nn.LSTMCell, 1), "1 layer"), (MODELS["fed back"], "2 layers")]
)
def test_fewer_layers_than_devices_are_refused_with_a_sentence(
    make: Callable[[], nn.Module], layers: str, peers: Callable[[int], Peers]
) -> None:
    cut = WavefrontCut(Wavefront(parts=3), peers(3))
    with pytest.raises(InvalidInput) as refused:
        cut.prepare(loss, make(), torch.zeros(2, 4, dtype=torch.int64))
    assert str(refused.value) == (
        f"wavefront is 3: the cells that its loop uses at every step are {layers}, of which none depends on one above "
        "it; give at most that many"
    )


def test_a_call_that_cannot_be_cut_so_is_refused_with_a_sentence(peers: Callable[[int], Peers]) -> None:
    cut_model = model(rnn=nn.LSTM(3, 4, 2))
    cut = WavefrontCut(Wavefront(parts=1), peers(1))
    cut.prepare(call_model, cut_model, ((), {}))
    with cut.at_work(), torch.autocast("cpu"), pytest.raises(InvalidInput, match=r"autocast is 'on': .* comes to rnn$"):
        cut_model["rnn"](torch.zeros(2, 1, 3))
    with cut.at_work(), pytest.raises(InvalidInput, match="input is 'empty': give rnn sequences of one step or more"):
        cut_model["rnn"](torch.zeros(0, 1, 3))


def test_a_run_that_cannot_be_cut_so_ends_with_that_sentence(start: Start) -> None:
    script = """
import torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x).square().mean())
for batch in trainer.batches(torch.zeros(4, 3), batch_size=2):
    trainer.step(batch)
"""
    run = start(script, "--wavefront 2").end()
    assert run.code != 0
    assert run.sentence.endswith(NOT_STACKED + NO_CELL)


def test_a_model_that_is_cut_again_uses_the_new_devices(peers: Callable[[int], Peers]) -> None:
    cut_model = model(rnn=nn.GRU(3, 4, 2))
    whole = cut_model["rnn"].forward
    for _ in range(2):
        WavefrontCut(Wavefront(parts=1, time_block=2), peers(1)).prepare(call_model, cut_model, ((), {}))
    assert cut_model["rnn"].forward != whole
    assert cut_model["rnn"].forward.whole == whole


def test_a_batch_without_samples_is_one(peers: Callable[[int], Peers]) -> None:
    cut_model = model(rnn=nn.GRU(3, 4, 2))
    cut = WavefrontCut(Wavefront(parts=1, time_block=2), peers(1))
    cut.prepare(call_model, cut_model, ((), {}))
    with cut.at_work():
        output, final = cut_model["rnn"](torch.zeros(5, 0, 3))
    output.sum().backward()
    assert (output.shape, final.shape) == ((5, 0, 4), (2, 0, 4))
    assert not cut_model["rnn"].weight_hh_l1.grad.any()


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), data=st.data())
def test_layers_are_divided_so_that_the_dearest_part_is_as_cheap_as_can_be(
    costs: list[int], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(costs)))

    def dearest(bounds: tuple[int, ...]) -> int:
        return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds))

    bounds = even_bounds(costs, parts)
    assert len(bounds) == parts + 1
    assert all(start < stop for start, stop in itertools.pairwise(bounds))
    assert (bounds[0], bounds[-1]) == (0, len(costs))
    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    assert dearest(tuple(bounds)) == min(dearest((0, *inner, len(costs))) for inner in cuts)
