"""Tiles give what one process gives: outputs, buffers, every gradient, whatever the model is like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiles_training
import torch
from conftest import MAIN, Run, Start
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES
from paceline.memory.channels_last import channels_are_last
from paceline.split.tiles.side_by_side import HowImagesLie

MOST_DEVICES = 4
CLOSE = 1e-9  # tensors are of float64

Measure = Callable[[dict[str, Any]], list[dict[str, Any]]]


def mailboxes(count: int) -> int:
    descriptor = os.memfd_create("test-peers")
    os.ftruncate(descriptor, count * count * BOX_BYTES)
    return descriptor


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """`measure(case)` lets real processes compute a case, and fails unless all that did are close to one process. What
    each of them says."""
    board = Board.create(MOST_DEVICES, supervised=False)
    descriptors = [board.descriptor, *(mailboxes(count) for count in range(1, MOST_DEVICES + 1))]
    script = Path(__file__).with_name("tiles_device.py")
    devices = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "paceline.launch.script",
                str(script),
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

    def measured(case: dict[str, Any]) -> list[dict[str, Any]]:
        for device in devices:
            assert device.stdin is not None
            device.stdin.write(json.dumps(case) + "\n")
            device.stdin.flush()
        answers = [json.loads(device.stdout.readline()) for device in devices if device.stdout is not None]
        answers = answers[: case["rows"] * case["columns"]]
        failed = [f"device {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if "failed" in answer]
        assert not failed, min(failed, key=lambda text: "gave up after" in text)  # the others have waited for it
        for rank, answer in enumerate(answers):
            for name, distance in answer.get("distances", {}).items():
                assert distance < CLOSE, f"device {rank}: {name} is {distance} away, in {answer['model']}"
        return answers

    yield measured
    for device in devices:
        device.communicate(timeout=60)
        assert device.returncode == 0
    for descriptor in descriptors:
        os.close(descriptor)


# ── random models ────────────────────────────────────────────────────────────────────────────────────────────


def pairs(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=2, max_size=2)


@st.composite
def convolutions(draw: st.DrawFn) -> Any:
    same = draw(st.sampled_from([False, False, True]))
    options = {
        "out": draw(st.integers(1, 4)),
        "kernel_size": draw(pairs(1, 5)),
        "stride": 1 if same else draw(pairs(1, 3)),
        "padding": "same" if same else draw(pairs(0, 3)),
        "dilation": draw(pairs(1, 2)),
        "bias": draw(st.booleans()),
        "groups": draw(st.sampled_from(["one", "all"])),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "circular", "replicate"])),
    }
    return "Conv2d", options


@st.composite
def transposed(draw: st.DrawFn) -> Any:
    stride = draw(st.integers(1, 3))
    options = {
        "out": draw(st.integers(1, 3)),
        "kernel_size": draw(pairs(1, 4)),
        "stride": stride,
        "padding": draw(pairs(0, 2)),
        "output_padding": draw(st.integers(0, stride - 1)),
        "bias": draw(st.booleans()),
    }
    return "ConvTranspose2d", options


@st.composite
def poolings(draw: st.DrawFn) -> Any:
    kernel = draw(pairs(1, 4))
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "stride": draw(st.none() | pairs(1, 3)),
        "padding": [draw(st.integers(0, size // 2)) for size in kernel],
        "ceil_mode": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["MaxPool2d", "AvgPool2d"]))
    if kind == "MaxPool2d":
        # torch itself writes beyond its memory for a window that is padding alone.
        options["dilation"] = 1 if any(options["padding"]) else draw(pairs(1, 2))
    else:
        options["count_include_pad"] = draw(st.booleans())
        options["divisor_override"] = draw(st.none() | st.integers(1, 5))
    return kind, options


@st.composite
def resizings(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 3)) == 0:
        return "PixelShuffle", {"upscale_factor": draw(st.integers(1, 2))}
    mode = draw(st.sampled_from(["nearest", "nearest-exact", "bilinear", "bilinear", "bicubic"]))
    options: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        options["size"] = draw(pairs(3, 14))
    else:
        options["scale_factor"] = draw(st.sampled_from([2.0, 3.0, 1.5, 0.7]))
    if mode.startswith("bi"):
        options["align_corners"] = draw(st.booleans())
    return "Upsample", options


FUNCTIONS = "shuffle,half,channels last,weighted,in place,whole map,largest,unknown,softmax,norm,pad,where,where am I"

others = st.one_of(
    st.tuples(st.just("BatchNorm2d"), st.fixed_dictionaries({"momentum": st.sampled_from([0.1, None])})),
    st.tuples(st.just("InstanceNorm2d"), st.fixed_dictionaries({"affine": st.booleans()})),
    st.sampled_from(
        [
            ("GroupNorm", {}),
            ("PReLU", {}),
            ("ReLU", {}),
            ("ReLU", {"inplace": True}),
            ("GELU", {}),
            ("Dropout", {"p": 0.4}),
            ("Dropout", {"p": 0.4, "inplace": True}),
            ("Dropout2d", {"p": 0.4}),
            ("LocalResponseNorm", {"size": 3}),
            ("Squeeze", {"way": "pool"}),
            ("Squeeze", {"way": "mean"}),
            ("BatchNorm2d", {"track_running_stats": False}),
        ]
    ),
    st.tuples(st.just("Function"), st.fixed_dictionaries({"name": st.sampled_from(FUNCTIONS.split(","))})),
)
simple = st.one_of(convolutions(), convolutions(), poolings(), resizings(), transposed(), others, others)
branches = st.tuples(
    st.just("Residual"),
    st.fixed_dictionaries(
        {"layers": st.lists(simple, min_size=1, max_size=3), "joined": st.sampled_from(["add", "cat"])}
    ),
)
first = convolutions() | poolings()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, columns = draw(st.sampled_from([(2, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 1)]))
    return {
        "rows": rows,
        "columns": columns,
        "seed": draw(st.integers(0, 9)),
        "shape": [draw(st.integers(1, 4)), draw(st.integers(1, 4)), *draw(pairs(4, 17))],
        "layers": [draw(first), *draw(st.lists(simple | branches, max_size=5))],
        "head": draw(st.sampled_from(["dense", "flatten", "pool", "grid"])),
        "input_wanted": draw(st.booleans()),
        "collected": draw(st.booleans()),
        "by_row": draw(st.booleans()),
        "last": draw(st.integers(0, 4)) == 0,
    }


@pytest.mark.timeout(300)
@given(cases())
@settings(
    max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_any_stack_gives_what_one_process_gives(measure: Measure, case: dict[str, Any]) -> None:
    for answer in measure(case):
        assert "distances" in answer or "too few for" in answer["refused"]


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = Path(__file__).with_name("tiles_training.py")


@pytest.fixture(scope="module")
def alone(start: Start) -> Callable[[float], Run]:
    """One process, with so much dropout."""
    runs = {dropout: start(SCRIPT, None, f"--double --dropout {dropout}") for dropout in (0.0, 0.3)}
    return lambda dropout: runs[dropout].fine(200)


# Replicas draw masks of their own, so with several of them nothing is dropped.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "dropout"),
    [pytest.param("--tiles 2x2", 0.3, marks=pytest.mark.soak), ("--tiles 2 --replicas 2", 0.0)],
)
def test_a_run_gives_the_losses_and_the_checkpoint_of_one_process(
    flags: str, dropout: float, start: Start, alone: Callable[[float], Run]
) -> None:
    # In float64: in float32 the rounding of one torch or another decides which of two pixels is the highest.
    run, reference = start(SCRIPT, flags, f"--double --dropout {dropout}").fine(200), alone(dropout)
    for key in ("losses", "before", "after"):
        assert run.told(key) == pytest.approx(reference.told(key), rel=1e-9), key
    assert len(set(run.told("losses"))) == 6
    saved, expected = (load_file(each.folder / "model.safetensors") for each in (run, reference))
    tiles_training.make().load_state_dict(saved, strict=True)
    for name, value in saved.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text
        )
    run.assert_nothing_left()


RAGGED = """
import json, sys
import torch
from torch import nn
from torch.nn import functional as F
import paceline as pl

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.drop = nn.Dropout2d(float(sys.argv[3]), inplace=True)
        self.pooled, self.choose = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.drop(self.down(self.norm(self.first(x)))))  # 7 rows
        x = x.view(len(x), 2, 3, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        return self.choose(self.pooled(x.mean((2, 3))))

model, samples = Model(), int(sys.argv[1])
data = torch.randn(samples, 2, 14, 6), torch.arange(samples) % 3
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1),
                     lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
losses = [trainer.step(batch) for batch in trainer.batches(data, batch_size=int(sys.argv[2]), epochs=2)]
buffers = [float(buffer.double().sum()) for buffer in model.buffers()]
weights = [float(parameter.sum()) for parameter in model.parameters()]
print(json.dumps({"losses": losses, "buffers": buffers, "weights": weights}))
"""


# Replicas draw masks of their own, so with several of them nothing is dropped.
@pytest.mark.parametrize(
    ("samples", "batch", "dropout", "flags"),
    [(13, 8, 0.25, "--tiles 2"), (13, 5, 0.25, "--tiles 2"), (18, 9, 0.0, "--tiles 2 --replicas 2")],
    ids=["by sample, then by row", "by row, then by sample", "one replica each"],
)
def test_batches_that_are_dealt_out_and_others_that_are_not_train_alike(
    samples: int, batch: int, dropout: float, flags: str, start: Start
) -> None:
    alone, cut = (start(RAGGED, how, f"{samples} {batch} {dropout}").fine() for how in (None, flags))
    for what in ("losses", "buffers", "weights"):
        assert cut.told(what) == pytest.approx(alone.told(what), rel=1e-9), what


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_verify_finds_no_difference(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            MAIN,
            "verify",
            str(SCRIPT),
            "--tiles",
            "2",
            "--tolerance",
            "1e-9",
            "--",
            "--dropout",
            "0.3",
            "--double",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────


def case_of(layers: list[Any], **changed: Any) -> dict[str, Any]:
    case = {"rows": 2, "columns": 1, "seed": 0, "shape": [1, 2, 6, 6], "layers": layers, "head": "pool"}
    return {**case, "input_wanted": False, "last": False, "collected": True, "by_row": False, **changed}


def refused(measure: Measure, layers: list[Any], **changed: Any) -> str:
    """The sentence by which all devices refuse it."""
    (sentence,) = {answer["refused"] for answer in measure(case_of(layers, **changed))}
    assert isinstance(sentence, str)
    return sentence


def test_more_tiles_than_rows_are_refused(measure: Measure) -> None:
    conv = ["Conv2d", {"out": 2, "kernel_size": 3, "padding": 1}]
    sentence = refused(measure, [conv], shape=[1, 2, 3, 9], rows=4)
    assert sentence == (
        "tiles is '4x1': conv2d in 0 (Conv2d) cannot be cut, it makes 3 rows of 3, too few for 4 devices: "
        "give at most that many tiles"
    )


def test_columns_of_what_has_only_rows_are_refused(measure: Measure) -> None:
    sentence = refused(measure, [], shape=[2, 3, 8], head="sequence", rows=2, columns=2)
    assert sentence == (
        "tiles is '2x2': conv1d in 0 (Conv1d) cannot be cut, it has one spatial dim, which is cut by rows: "
        "give --tiles N"
    )


def test_a_model_without_images_is_refused(measure: Measure) -> None:
    sentence = refused(measure, [], shape=[2, 6], head="flat")
    assert sentence == (
        "model is 'Sequential': it has no convolution or pooling, so no image to cut into tiles 2x1, only Linear, "
        "ReLU: leave out --tiles"
    )


def test_an_op_that_changes_a_part_of_a_tile_in_place_is_refused_by_name(measure: Measure) -> None:
    conv = ["Conv2d", {"out": 2, "kernel_size": 3}]
    sentence = refused(measure, [conv, ["Function", {"name": "assigned"}]])
    assert sentence == (
        "tiles is '__setitem__ in 1 (Function)': it changes a part of an image in place, which cannot be cut: "
        "write it without, or leave out --tiles"
    )


def test_a_run_that_cannot_be_cut_ends_with_one_sentence_before_its_first_step(start: Start) -> None:
    script = """
import torch
from torch import nn
import paceline as pl
torch.manual_seed(0)
model = nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x).mean())
for batch in trainer.batches(torch.zeros(8, 4), 4):
    trainer.step(batch)
"""
    run = start(script, "--tiles 2").end()
    assert run.code == 1
    assert "model is 'Linear': it has no convolution or pooling, so no image to cut into tiles 2x1, only Linear: " in (
        run.sentence
    )


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_sequences_and_volumes_are_cut_along_their_first_dims(measure: Measure) -> None:
    for head, shape in (("sequence", [2, 3, 17]), ("volume", [1, 2, 7, 6, 5])):
        for answer in measure(case_of([], head=head, shape=shape, input_wanted=True)):
            assert answer["distances"]


CONV: Any = ["Conv2d", {"out": 2, "kernel_size": 3, "padding": 1}]
REFLECT: Any = ["Conv2d", {"out": 2, "kernel_size": 3, "padding": 1, "padding_mode": "reflect"}]


def test_the_head_is_the_first_devices_alone_and_statistics_before_it_are_of_all(measure: Measure) -> None:
    layers = [CONV, ["BatchNorm2d", {}], ["Squeeze", {"way": "mean"}]]
    for rank, answer in enumerate(measure(case_of(layers))):
        assert answer["first alone"] == (["5.bias", "5.weight"] if rank else [])
        assert answer["over devices"] == ["1"]
        assert answer["warned"] == []


def test_images_of_few_rows_are_dealt_out_by_sample_and_meet_those_by_row(measure: Measure) -> None:
    """Of a layer with few rows the halo is much; what comes up again is put beside what was never dealt out, either way
    round, and what two layers are given is moved once. What is not cut yet is dealt out for a smaller halo."""
    by_sample, by_row = ["Function", {"name": "by sample"}], ["Function", {"name": "by row"}]
    down = ["Conv2d", {"out": 3, "kernel_size": [7, 3], "stride": 2, "padding": [3, 1]}]
    far = ["Conv2d", {"out": 2, "kernel_size": [7, 3], "padding": [3, 1]}]
    up = ["Upsample", {"scale_factor": 2, "mode": "bilinear"}]
    inside = [down, by_sample, ["BatchNorm2d", {}], ["MaxPool2d", {"kernel_size": 3, "stride": 1, "padding": 1}], up]
    layers = [CONV, by_row, ["Residual", {"layers": inside, "joined": "cat"}], CONV, down, by_sample, CONV, by_sample]
    for answer in measure(case_of(layers, shape=[4, 2, 134, 6], input_wanted=True)):
        assert answer["distances"]
    twice = ["Residual", {"layers": [far, ["BatchNorm2d", {}]], "joined": "add"}]
    for answer in measure(
        case_of([CONV, by_row, twice, ["ReLU", {"inplace": True}], twice, by_sample], shape=[4, 2, 134, 6])
    ):
        assert answer["distances"]
    for answer in measure(case_of([CONV, by_sample, CONV], shape=[4, 2, 130, 6], input_wanted=True)):
        assert answer["distances"]
    for answer in measure(case_of([CONV, down, by_row], shape=[1, 2, 14, 6])):  # one sample: there is nothing to deal
        assert answer["distances"]


def test_channels_lie_side_by_side_where_kernels_are_small_and_nobody_can_tell(measure: Measure) -> None:
    """Of dropout and of some views one can tell: there images stay as they lie. What is gathered lies as planes."""
    lies, planes = (["Function", {"name": name}] for name in ("side by side", "planes"))
    pool = ["MaxPool2d", {"kernel_size": 3, "stride": 2, "padding": 1}]
    rows = ["Function", {"name": "rows"}]  # gathers the image, and views it as only planes can be
    large = ["Conv2d", {"out": 40, "kernel_size": 3, "padding": 1}]
    layers = [CONV, lies, ["BatchNorm2d", {}], pool, lies, rows, CONV, lies, large, planes, CONV, planes]
    for answer in measure(case_of(layers, shape=[2, 2, 16, 16], input_wanted=True)):
        assert answer["distances"]
    for as_it_lies in (["Dropout", {"p": 0.4}], ["GroupNorm", {}], ["Function", {"name": "merged"}]):
        for answer in measure(case_of([CONV, planes, as_it_lies, CONV, planes], shape=[2, 2, 8, 8], by_row=True)):
            assert answer["distances"]
    for answer in measure(case_of([CONV, planes, ["GroupNorm", {}], CONV, planes], shape=[2, 2, 8, 8])):  # by sample
        assert answer["distances"]
    for last in (True, "weights"):  # then torch lays images out so itself
        for answer in measure(case_of([CONV, lies, ["Dropout", {"p": 0.4}], CONV], shape=[2, 2, 8, 8], last=last)):
            assert answer["distances"]


def test_a_view_that_only_planes_allow_is_found_also_where_the_first_images_are_small_and_lie_as_planes() -> None:
    image, found = torch.zeros(2, 4, 6, 5), HowImagesLie()
    assert found.for_convolution(image, image.numel(), torch.zeros(400, 4, 3, 3)) is image
    found.check_view(image, (2, 2, 2, 6, 5))
    found.check_view(torch.zeros(2, 3), (6,))
    assert found.allowed
    found.check_view(image, (8, 1, 6, 5))
    assert not found.allowed


def test_a_forward_that_has_come_to_planes_stays_with_them_and_the_next_begins_anew() -> None:
    found, image, small, large = (
        HowImagesLie(),
        torch.zeros(2, 4, 6, 5),
        torch.zeros(4, 4, 1, 1),
        torch.zeros(400, 4, 3, 3),
    )
    for _ in range(2):
        found.begin()
        lie = [channels_are_last(found.for_convolution(image, image.numel(), way)) for way in (small, large, small)]
        assert lie == [True, False, False]


def test_gathering_a_large_image_in_the_middle_is_told_once(measure: Measure) -> None:
    first, *others = measure(case_of([CONV, REFLECT, CONV]))
    assert first["warned"] == [
        "tiles: 1 (Conv2d) gathers the image for pad, which is exact and no faster than on one device"
    ]
    assert all(answer["warned"] == [] for answer in others)
