"""A pipeline gives what one process gives: losses, every gradient, buffers, outputs; whatever the model is like."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import Start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stage_threads import pipeline, summed_gradients, value_of, whole_buffers
from torch import nn

from paceline.errors import DataError, InvalidInput, ModelError, StrategyError
from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES, Peers
from paceline.memory.arena import Arena
from paceline.split.stage_schedule import order
from paceline.split.stages.micro_batches import micro_batches
from paceline.split.values import Stages

SCRIPT = Path(__file__).with_name("stages_training.py")
WIDTH = 8
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # tensors are of float64


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def assert_like_one_process(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batches: list[Any],
    split: Stages,
    last: Callable[[nn.Module], Any] | None = None,
) -> None:
    alone = make()
    losses = []
    for batch in batches:
        alone.train()
        found = loss(alone, batch)
        losses.append(value_of(found))
        found.backward()
    devices = pipeline(split, make, loss, batches, last)
    assert devices[-1].losses == pytest.approx(losses, rel=1e-9)
    assert [device.cut.speaks for device in devices] == [False] * (split.stages - 1) + [True]
    gradients = summed_gradients(devices)
    for name, parameter in alone.named_parameters():
        if parameter.grad is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], parameter.grad, **CLOSE, msg=f"the gradient of {name}")
    if last is not None:
        alone.eval()
        with torch.no_grad():
            expected = last(alone)
        for device in devices:
            torch.testing.assert_close(device.output, expected, **CLOSE)


def test_a_sum_over_very_unequal_micro_batches_has_the_gradient_of_the_mean_over_all() -> None:
    x, mask = numbers(6, WIDTH), torch.tensor([0, 0, 1, 0, 7, 2]).double()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = batch
        return (model(x).square().sum(1) * mask).sum(), mask.sum()

    alone = make()
    total, count = loss(alone, (x, mask))
    (total / count).backward()  # type: ignore[no-untyped-call]
    devices = pipeline(Stages(stages=2, micro_batches=3), make, loss, [(x, mask)])
    assert devices[-1].losses == pytest.approx([float(total.detach() / count)], rel=1e-12)
    gradients = summed_gradients(devices)
    for name, parameter in alone.named_parameters():
        found = gradients[name]
        assert found is not None
        torch.testing.assert_close(found * devices[-1].weight, parameter.grad, rtol=1e-12, atol=1e-15)


# ── any model ────────────────────────────────────────────────────────────────────────────────────────────────


class Graph(nn.Module):
    """Operations drawn at random, each on values that came before; some are used much later, by another stage."""

    def __init__(self, steps: list[tuple[str, int, int]], outputs: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.steps, self.outputs = steps, outputs
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.layers = nn.ModuleList(
            {"linear": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.LayerNorm(WIDTH)}.get(kind, nn.Identity)()
            for kind, _, _ in steps
        )
        self.double()

    def forward(self, x: torch.Tensor, other: dict[str, torch.Tensor], scale: float = 1.0) -> dict[str, Any]:
        values: list[Any] = [x, other["y"]]
        for number, (kind, i, j) in enumerate(self.steps):
            a, b = values[i % len(values)], values[j % len(values)]
            if kind in ("linear", "norm"):
                values.append(self.layers[number](a))
            elif kind == "tied":
                values.append(torch.tanh(self.tied(a)))
            elif kind == "table":
                values.append(a * self.table + self.shift)
            elif kind == "add":
                values.append(a + b)
            elif kind == "sizes":
                samples, width = b.shape
                values.append(
                    (a * (width / 10)).reshape(samples, 2, width // 2).transpose(1, 2).reshape(samples, width)
                )
            elif kind == "parts":
                left, right = a.chunk(2, -1)
                values.append(torch.cat([right, b[:, : WIDTH // 2] * left], -1))
            elif kind == "largest":
                values.append(a - a.max(-1, keepdim=True).values)
            elif kind == "in_place":
                changed = a * 2
                values.append(changed)
                changed.add_(b)
            elif kind == "noted":
                with torch.no_grad():
                    factor = torch.sigmoid(b)
                values.append(a * factor)
        first, second = self.outputs
        return {"y": values[-1] * scale, "also": [values[first % len(values)], values[second % len(values)], WIDTH]}


KINDS = ["linear", "tied", "table", "add", "sizes", "parts", "largest", "in_place", "noted", "norm"]


def graph_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    output = model(batch["x"], other={"y": batch["y"]}, scale=batch["scale"])
    first, second, width = output["also"]
    return F.mse_loss(output["y"], batch["target"]) + (first * 0.1).cos().mean() + second.sum(-1).sin().mean() / width


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12),
    outputs=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    stages=st.sampled_from([1, 2, 3]),
    micro=st.integers(1, 5),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    samples=st.tuples(st.integers(2, 9), st.integers(1, 9)),
)
def test_any_graph_of_operations_gives_the_gradients_of_one_process(
    steps: list[tuple[str, int, int]],
    outputs: tuple[int, int],
    stages: int,
    micro: int,
    schedule: str,
    samples: tuple[int, int],
) -> None:
    # A linear layer at each end: something to train, whatever is drawn; and places to cut.
    steps = [("linear", 0, 0), ("linear", 2, 0), *steps, ("linear", len(steps) + 3, 0)]
    batches = [
        {"x": numbers(n, WIDTH), "y": numbers(n + 1, WIDTH)[1:], "target": numbers(n, WIDTH) / 2, "scale": 0.7}
        for n in samples
    ]
    split = Stages(stages=stages, micro_batches=micro, schedule=schedule)

    def ask(model: nn.Module) -> Any:  # in another way than the loss does
        found = model(batches[0]["x"], {"y": batches[0]["y"]})
        return [found["y"], *found["also"][:2]]

    assert_like_one_process(lambda: Graph(steps, outputs), graph_loss, batches, split, ask)


class Blocks(nn.Module):
    """A small language model: tied weights, positions made in its forward, a check of the length."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(11, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, blocks, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, words: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        _, length = words.shape
        assert length <= 9, "too long"
        places = torch.arange(length, dtype=torch.float64).unsqueeze(-1)
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=torch.float64), 1)
        found = self.head(self.encoder(self.embedding(words) + places / length, mask=mask))
        if targets is None:
            return found
        return F.cross_entropy(found.flatten(0, 1), targets.flatten())


def words(samples: int, length: int) -> torch.Tensor:
    return torch.randint(11, (samples, length), generator=torch.Generator().manual_seed(samples + length))


@pytest.mark.parametrize("cut_at", [(), ("encoder.layers.1", "encoder.layers.2")])
def test_a_transformer_with_tied_weights_whose_shapes_change_between_steps(cut_at: tuple[str, ...]) -> None:
    batches = [(words(n, t), words(n + 1, t)[1:]) for n, t in ((6, 5), (4, 9), (1, 3), (6, 5))]
    split = Stages(stages=3, micro_batches=4, cut_at=cut_at)
    # Evaluation calls it without targets, and gets an output of another kind.
    asked = words(3, 7)
    assert_like_one_process(Blocks, lambda model, batch: model(*batch), batches, split, lambda model: model(asked))


class Normed(nn.Module):
    """BatchNorm in two stages; another forward in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU())
        self.third = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)).mean((2, 3))
        if self.training:
            x = x * 2
        return self.third(x)


@pytest.mark.parametrize("cut_at", ["first.1", "second.1", "third"])
def test_batchnorm_has_the_statistics_of_micro_batches_and_keeps_its_buffers_where_it_is(cut_at: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    alone, batches, count = Normed(), [numbers(8, 2, 7, 7), numbers(5, 2, 7, 7)], 2
    for batch in batches:
        for piece, share in micro_batches(batch, count):
            (loss(alone, piece) * share).backward()
    split = Stages(stages=2, micro_batches=count, cut_at=(cut_at,))
    devices = pipeline(split, Normed, loss, batches, lambda model: model(batches[0]))
    for name, gradient in summed_gradients(devices).items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad, **CLOSE)
    torch.testing.assert_close(whole_buffers(devices), dict(alone.named_buffers()), **CLOSE)
    alone.eval()
    for device in devices:
        torch.testing.assert_close(device.output, alone(batches[0]).detach(), **CLOSE)


class Named(NamedTuple):
    mean: torch.Tensor
    raw: torch.Tensor


def test_outputs_keep_their_kind_and_parameters_that_only_the_loss_uses_are_trained() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.one, self.two = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: torch.Tensor) -> Named:
            h = self.one(x)
            return Named(self.two(h.relu()), x)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = model(x)
        assert isinstance(found, Named)
        assert found.raw.shape == x.shape
        return found.mean.square().mean() + sum(p.square().sum() for p in model.parameters())

    split = Stages(stages=2, micro_batches=3)
    asked = numbers(2, WIDTH)
    assert_like_one_process(Two, loss, [numbers(6, WIDTH)], split, lambda model: tuple(model(asked)))


# ── micro-batches and schedules ──────────────────────────────────────────────────────────────────────────────


@given(schedule=st.sampled_from(["1f1b", "gpipe"]), stages=st.integers(1, 6), count=st.integers(1, 12))
def test_every_micro_batch_goes_forward_and_then_backward_once(schedule: str, stages: int, count: int) -> None:
    for stage in range(stages):
        steps = order(schedule, stage, stages, count)
        held = most = 0
        for kind in ("forward", "backward"):
            assert [number for what, number in steps if what == kind] == list(range(count))
        for what, number in steps:
            held += 1 if what == "forward" else -1
            most = max(most, held)
            assert what == "forward" or steps.index(("forward", number)) < steps.index((what, number))
        assert most == (count if schedule == "gpipe" else min(count, stages - stage))


@given(length=st.integers(1, 20), count=st.integers(1, 8))
def test_a_batch_is_cut_along_the_samples_alone(length: int, count: int) -> None:
    batch = {"x": torch.arange(length), "names": [str(n) for n in range(length)], "weights": torch.ones(length + 1, 2)}
    batch |= {"y": torch.arange(2 * length).view(length, 2), "flag": True}
    pieces = micro_batches(batch, count)
    assert len(pieces) == min(length, count)
    assert torch.cat([piece["x"] for piece, _ in pieces]).tolist() == list(range(length))
    assert [name for piece, _ in pieces for name in piece["names"]] == batch["names"]
    assert sum(share for _, share in pieces) == pytest.approx(1)
    for piece, share in pieces:
        assert share == len(piece["x"]) / length
        assert len(piece["y"]) == len(piece["names"]) == len(piece["x"])
        assert piece["flag"] is True
        assert len(piece["weights"]) == length + 1


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str = "pair"


def test_a_dataclass_of_samples_is_cut_too() -> None:
    pieces = micro_batches({"pair": Pair(torch.arange(5)), "more": UserDict(y=torch.ones(5, 2))}, 2)
    assert [piece["pair"].x.tolist() for piece, _ in pieces] == [[0, 1, 2], [3, 4]]
    assert [tuple(piece["more"]["y"].shape) for piece, _ in pieces] == [(3, 2), (2, 2)]
    assert pieces[0][0]["pair"].name == "pair"


def test_what_the_first_device_decides_reaches_all_devices_of_all_replicas() -> None:
    board = Board.create(6, supervised=False)
    descriptor = os.memfd_create("test-peers")
    os.ftruncate(descriptor, 3 * 2 * 2 * BOX_BYTES)
    arena = Arena.of(descriptor)
    devices = [Peers(arena, board, process, process % 2, 2, 60.0) for process in range(6)]
    told: dict[int, list[list[int]]] = {process: [] for process in range(6)}

    def listen(process: int) -> None:
        for numbers in ([3, 1], [], list(range(9))):
            told[process].append(devices[process].tell_all(numbers if process == 0 else None))

    threads = [threading.Thread(target=listen, args=(process,)) for process in reversed(range(6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found == [[3, 1], [], list(range(9))] for found in told.values())
    arena.close()
    os.close(board.descriptor)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).double()


class Deciding(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Remembering(nn.Sequential):
    """Its forward depends on what was there before, which no list of operations shows."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Doubled(torch.autograd.Function):
    """Has a backward that is not that of its forward, as an estimator may have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 5


class OwnBackward(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(x))  # type: ignore[no-any-return]


class TwiceNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.norm(x)))


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


@pytest.mark.parametrize(
    ("make", "loss", "split", "batch", "sentence"),
    [
        (stack, mean, {"cut_at": ("5",)}, None, "cut-at is '5': give a module that the model calls: "),
        (stack, mean, {"cut_at": ("0",)}, None, "cut-at is '0': the model begins there"),
        (stack, mean, {"stages": 3, "cut_at": ("2", "1")}, None, "cut-at is '2,1': 1 comes before the others"),
        (stack, mean, {"stages": 6}, None, "stages is 6: the model can be cut at 4 places only, give at most 5"),
        (stack, lambda m, b: m(numbers(b["x"], WIDTH)).mean(), {}, {"x": 3}, "batch is 'dict': it has no tensors"),
        (lambda: Deciding(*stack()), mean, {}, None, "(return super().forward(x) if x.sum() > 0 else x), so it cannot"),
        (lambda: Remembering(*stack()), mean, {}, None, "it gives another loss when it is called again"),
        (lambda: OwnBackward(*stack()), mean, {}, None, "it gives another gradient of 0.weight than when it is called"),
        (lambda: TwiceNormed().double(), mean, {"stages": 3}, None, "the model can be cut at 1 places only"),
        (lambda: TwiceNormed().double(), mean, {"cut_at": ("linear",)}, None, "lies on both sides"),
        (lambda: torch.compile(stack(), backend="eager"), mean, {}, None, "leave out torch.compile"),
    ],
)
def test_what_cannot_be_cut_by_layer_is_refused_with_a_sentence(
    make: Callable[[], nn.Module], loss: Any, split: dict[str, Any], batch: Any, sentence: str
) -> None:
    given = {"stages": 2, "micro_batches": 2, **split}
    with pytest.raises((StrategyError, ModelError, DataError)) as raised:
        pipeline(Stages(**given), make, loss, [numbers(4, WIDTH) if batch is None else batch])
    assert isinstance(raised.value, InvalidInput)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


# ── real runs ────────────────────────────────────────────────────────────────────────────────────────────────


def largest_difference(one: Path, other: Path) -> float:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.mark.soak
def test_runs_train_and_evaluate_as_one_process_does_and_save_what_plain_torch_loads(start: Start) -> None:
    """AdamW, clipping, accumulation, a last small batch, weights tied over stages."""
    alone = start(SCRIPT, None, "--accumulate 2")
    two = start(SCRIPT, "--stages 2 --micro-batches 4", "--accumulate 2")
    alone.fine(), two.fine()
    four = start(SCRIPT, "--stages 2 --replicas 2 --micro-batches 2 --schedule gpipe", "--accumulate 2").fine()
    for run in (two, four):
        assert run.told("losses") == pytest.approx(alone.told("losses"), rel=1e-9)
        assert run.told("evaluated") == pytest.approx(alone.told("evaluated"), rel=1e-9)
        # Every device says the same, also those whose own loss does not count.
        assert run.told("losses", 1) == run.told("losses")
        assert run.told("evaluated", 1) == run.told("evaluated")
        assert largest_difference(alone.folder / "model.safetensors", run.folder / "model.safetensors") < 1e-9
        assert largest_difference(run.folder / "model.safetensors", run.folder / "plain.safetensors") == 0
        run.assert_nothing_left()


ONE_SHAPE = "--samples 32"  # of all micro-batches, four of 4 samples: every other shape would be captured


@pytest.mark.soak
def test_random_numbers_do_not_depend_on_where_the_model_is_cut(start: Start) -> None:
    """Dropout in one stage or in two, and noise that the loss draws before it calls the model and uses after."""
    runs = [
        start(SCRIPT, f"--micro-batches 4 {flags}", f"{ONE_SHAPE} --dropout 0.5 --noise 0.1 --epochs 1")
        for flags in ("--stages 1", "--stages 2 --cut-at blocks.1")
    ]
    whole, cut = (run.fine() for run in runs)
    assert cut.told("losses") == pytest.approx(whole.told("losses"), rel=1e-9)
    assert largest_difference(whole.folder / "model.safetensors", cut.folder / "model.safetensors") < 1e-9


def test_a_killed_device_ends_the_run_with_one_sentence(start: Start) -> None:
    run = start(SCRIPT, "--stages 2 --micro-batches 4", f"{ONE_SHAPE} --epochs 100000")
    end = time.monotonic() + 60
    while not list(run.folder.glob("steps-of-1")):
        assert time.monotonic() < end
        assert run.process.poll() is None
        time.sleep(0.05)
    os.kill(int((run.folder / "steps-of-1").read_text()), signal.SIGKILL)
    killed = time.monotonic()
    run.end()
    assert time.monotonic() - killed < 20
    assert run.code != 0
    assert "Traceback" not in run.err
    assert "device 1" in run.err or "replica 1" in run.err
    run.assert_nothing_left()
