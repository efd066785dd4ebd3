"""The user's optimizer over chunks of an arena does what it does over whole tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.model_arena import ModelArena, Sizes
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.optim.state import StateLayout, layout_for

Make = Callable[[list[dict[str, Any]]], Optimizer]

optim = torch.optim
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "SGD, momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD, nesterov": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, decay, maximize": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.1, maximize=True),
    "Adam": lambda groups: optim.Adam(groups, lr=0.01),
    "Adam, amsgrad, decay": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, maximize": lambda groups: optim.Adam(groups, lr=0.01, maximize=True),
    "Adam, rate as a tensor": lambda groups: optim.Adam(groups, lr=torch.tensor(0.01)),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "AdamW, amsgrad, maximize": lambda groups: optim.AdamW(groups, lr=0.01, amsgrad=True, maximize=True),
    "AdamW, for each": lambda groups: optim.AdamW(groups, lr=0.01, foreach=True),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.01),
    "RMSprop, centered, momentum": lambda groups: optim.RMSprop(
        groups, lr=0.01, centered=True, momentum=0.5, weight_decay=0.1, maximize=True
    ),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "Adagrad, decay, maximize": lambda groups: optim.Adagrad(groups, lr=0.1, weight_decay=0.1, maximize=True),
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=0.5, weight_decay=0.1, maximize=True),
    "Adamax": lambda groups: optim.Adamax(groups, lr=0.01, weight_decay=0.1, maximize=True),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.01, weight_decay=0.1, maximize=True),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.1, t0=2, weight_decay=0.1),
    "Rprop": lambda groups: optim.Rprop(groups, lr=0.01, maximize=True),
}
WHOLE: dict[str, Make] = {
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.01),
    "Muon": lambda groups: optim.Muon(groups, lr=0.01),
}


class Sharded:
    """A model's parameters in an arena, updated chunk by chunk."""

    def __init__(self, model: nn.ParameterDict, optimizer: Optimizer) -> None:
        self.parameters = dict(model.named_parameters())
        group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = [(name, p, group_of[p]) for name, p in self.parameters.items()]
        self.layout = layout_for(optimizer, named, owners=2)
        state = {
            number: dict(optimizer.state[self.parameters[slot.name]])
            for number, slot in enumerate(self.layout.slots)
            if optimizer.state.get(self.parameters[slot.name])
        }
        states = StateLayout(optimizer, self.layout, state)
        sizes = Sizes(1, tuple(states.block_bytes), scratch_bytes=64, buffer_bytes=0)
        self.arena = ModelArena.create(self.layout, sizes)
        self.optimizer = ShardOptimizer(optimizer, self.arena, states)
        self.optimizer.take_state(state)
        for slot in self.layout.slots:
            self.arena.parameter(slot).copy_(self.parameters[slot.name].detach())

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        for slot in self.layout.slots:
            self.arena.gradient(0, slot).copy_(gradients.get(slot.name, torch.zeros(slot.shape)))
        touched = [int(slot.name in gradients) for slot in self.layout.slots]
        self.optimizer.refresh_options()
        for number, chunk in enumerate(self.layout.chunks):
            self.optimizer.update(number, self.arena.chunk_of(self.arena.gradients[0], chunk).clone(), touched)

    def values(self) -> dict[str, torch.Tensor]:
        return {slot.name: self.arena.parameter(slot).clone() for slot in self.layout.slots}

    def state(self) -> dict[str, dict[str, Any]]:
        return {self.layout.slots[number].name: state for number, state in self.optimizer.give_state().items()}


def model_of(shapes: dict[str, tuple[int, ...]]) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(1)
    return nn.ParameterDict({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


def groups_of(model: nn.ParameterDict) -> list[dict[str, Any]]:
    """Two groups; the second learns at another rate."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003}]


def gradients_of(model: nn.ParameterDict, steps: int, unused: tuple[str, int] | None = None) -> Iterator[Any]:
    """Made-up gradients; `unused` names a parameter that gets none before that step."""
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        yield {
            name: torch.randn(parameter.shape, generator=generator)
            for name, parameter in model.named_parameters()
            if unused is None or name != unused[0] or step >= unused[1]
        }


def plain_step(model: nn.ParameterDict, optimizer: Optimizer, gradients: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone() if name in gradients else None
    optimizer.step()


def assert_close(actual: Any, expected: Any, what: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), what
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
        torch.testing.assert_close(actual, expected.detach(), rtol=2e-5, atol=2e-6, msg=lambda m: f"{what}: {m}")
    else:
        assert type(actual) is type(expected), what
        assert actual == pytest.approx(expected, rel=1e-6), what


def assert_same(sharded: Sharded, model: nn.ParameterDict, optimizer: Optimizer) -> None:
    for name, parameter in model.named_parameters():
        assert_close(sharded.values()[name], parameter, name)
    states = sharded.state()
    for name, parameter in model.named_parameters():
        expected = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
        assert states.get(name, {}).keys() == expected.keys(), name
        for key, value in expected.items():
            assert_close(states[name][key], value, f"{key} of {name}")


# 200 × 300 floats are cut into pieces, and the small ones share a chunk.
SHAPES: dict[str, tuple[int, ...]] = {"wide": (200, 300), "bias": (3,), "scalar": (), "tall": (500, 41)}
MATRICES: dict[str, tuple[int, ...]] = {"wide": (200, 300), "small": (7, 5), "square": (60, 60), "tall": (500, 41)}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_optimizer_over_chunks_equals_itself_over_whole_tensors(name: str) -> None:
    model = model_of(SHAPES)
    optimizer = ELEMENTWISE[name](groups_of(model))
    sharded = Sharded(model, optimizer)
    pieces = [[sharded.layout.slots[piece.slot].name for piece in chunk.pieces] for chunk in sharded.layout.chunks]
    assert sum("wide" in names for names in pieces) > 1
    assert any(len(names) > 1 for names in pieces)
    # "bias" gets its first gradient late: its step count then lags behind its neighbours'.
    for gradients in gradients_of(model, 5, unused=("bias", 2)):
        sharded.step(gradients)
        plain_step(model, optimizer, gradients)
    assert_same(sharded, model, optimizer)


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_gets_them(name: str) -> None:
    model = model_of(MATRICES)
    optimizer = WHOLE[name](groups_of(model))
    sharded = Sharded(model, optimizer)
    assert [len(chunk.pieces) for chunk in sharded.layout.chunks if chunk.bytes > 1 << 16] == [1, 1]
    for gradients in gradients_of(model, 5):
        sharded.step(gradients)
        plain_step(model, optimizer, gradients)
    assert_same(sharded, model, optimizer)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_state_goes_to_a_plain_optimizer_and_back(name: str) -> None:
    """Two steps sharded, two plain, two sharded again are six plain ones: as a checkpoint would carry it."""
    make = (ELEMENTWISE | WHOLE)[name]
    model = model_of(MATRICES if name in WHOLE else SHAPES)
    reference_model = copy.deepcopy(model)
    reference = make(groups_of(reference_model))
    optimizer = make(groups_of(model))
    steps = list(gradients_of(model, 6))
    for gradients in steps:
        plain_step(reference_model, reference, gradients)

    sharded = Sharded(model, optimizer)
    for gradients in steps[:2]:
        sharded.step(gradients)
    plain_model = copy.deepcopy(model)
    plain = make(groups_of(plain_model))
    for key, parameter in plain_model.named_parameters():
        parameter.data.copy_(sharded.values()[key])
        if key in sharded.state():
            plain.state[parameter] = sharded.state()[key]
    for gradients in steps[2:4]:
        plain_step(plain_model, plain, gradients)
    sharded = Sharded(plain_model, plain)
    for gradients in steps[4:]:
        sharded.step(gradients)
    assert_same(sharded, reference_model, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_keep_their_type(dtype: torch.dtype) -> None:
    model = model_of(SHAPES).to(dtype)
    optimizer = optim.AdamW(groups_of(model), lr=0.01)
    sharded = Sharded(model, optimizer)
    for gradients in gradients_of(model, 3):
        gradients = {name: gradient.to(dtype) for name, gradient in gradients.items()}
        sharded.step(gradients)
        plain_step(model, optimizer, gradients)
    for name, parameter in model.named_parameters():
        assert sharded.values()[name].dtype == dtype
        exactness = {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(sharded.values()[name], parameter.detach(), rtol=exactness, atol=exactness)


def test_a_changed_learning_rate_counts_from_the_next_update_on() -> None:
    model = model_of(SHAPES)
    optimizer = optim.SGD(groups_of(model), lr=0.1)
    sharded = Sharded(model, optimizer)
    for gradients in gradients_of(model, 3):
        sharded.step(gradients)
        plain_step(model, optimizer, gradients)
        for group in optimizer.param_groups:
            group["lr"] /= 2
    assert_same(sharded, model, optimizer)


def test_options_that_differ_have_another_fingerprint() -> None:
    def fingerprint(make: Make) -> int:
        model = model_of({"weight": (4,)})
        return Sharded(model, make([{"params": list(model.parameters())}])).optimizer.options_fingerprint()

    one = fingerprint(lambda groups: optim.AdamW(groups, lr=0.1))
    assert fingerprint(lambda groups: optim.AdamW(groups, lr=torch.tensor(0.1, dtype=torch.float64))) == one
    assert fingerprint(lambda groups: optim.AdamW(groups, lr=0.2)) != one
    assert fingerprint(lambda groups: optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99))) != one


def test_forgetting_reads_what_somebody_else_has_put_into_the_arena() -> None:
    """A survivor goes on with the state in the arena, not with what it remembers."""
    model = model_of(SHAPES)
    optimizer = optim.Adam(groups_of(model), lr=0.01)
    one, other = Sharded(model, optimizer), Sharded(model, optimizer)
    steps = list(gradients_of(model, 3))
    one.step(steps[0])
    for number in range(len(one.layout.chunks)):
        other.arena.state_block(number).copy_(one.arena.state_block(number))
    other.arena.parameters.copy_(one.arena.parameters)
    other.optimizer.forget()
    for gradients in steps[1:]:
        one.step(gradients)
        other.step(gradients)
    assert torch.equal(one.arena.parameters, other.arena.parameters)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────


def sparse_adam(model: nn.Module) -> Optimizer:
    return optim.SparseAdam(list(model.parameters()))


def with_hook(model: nn.Module) -> Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Remembering(optim.SGD):
    """Keeps something that is neither a tensor nor a number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = ["a list"]
        return super().step(closure)


REFUSALS: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "LBFGS": (
        lambda model: optim.LBFGS(model.parameters()),
        "optimizer is 'LBFGS': it needs the whole model and a closure; use one that updates each parameter by itself",
    ),
    "SparseAdam": (
        sparse_adam,
        "optimizer is 'SparseAdam': it takes sparse gradients only and mirrored replicas sum dense ones; use Adam",
    ),
    "step hooks": (
        with_hook,
        "optimizer is 'SGD': step hooks are not called by owners; do that work after trainer.step",
    ),
    "other state": (
        lambda model: Remembering(model.parameters(), lr=0.1),
        "optimizer is 'Remembering': it keeps 'history' as list; only tensors and numbers can be shared",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_optimizer_that_cannot_be_shared_is_refused_with_a_sentence(case: str) -> None:
    make, sentence = REFUSALS[case]
    model = model_of({"weight": (3, 4)})
    with pytest.raises(ModelError) as raised:
        Sharded(model, make(model))
    assert str(raised.value) == sentence


def test_an_unknown_optimizer_gets_whole_tensors() -> None:
    class Scaled(Optimizer):
        """Divides by the gradient's length, so it must see all of it."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        state["count"] = state.get("count", 0) + 1
                        parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"] / state["count"])

    model = model_of(SHAPES)
    optimizer = Scaled(groups_of(model))
    sharded = Sharded(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradients in gradients_of(model, 4):
            sharded.step(gradients)
            plain_step(model, optimizer, gradients)
    assert_same(sharded, model, optimizer)
