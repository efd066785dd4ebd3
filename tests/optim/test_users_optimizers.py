"""Optimizers that users bring along do over an arena what they do over whole tensors, or are refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.optim.models import grouped_parameters
from paceline.optim.trial import Sees, traits_of
from tests.conftest import Start
from tests.optim import users_optimizers as users
from tests.optim.test_shard_optimizer import Sharded, assert_same, gradients_of, groups_of, model_of, plain_step

SHAPES: dict[str, tuple[int, ...]] = {"wide": (90, 300), "bias": (3,), "scalar": (), "tall": (50, 41)}
KINDS: dict[type[users.Bare], Sees] = {
    users.Adan: Sees.TENSORS,
    users.Lars: Sees.TENSORS,
    users.Lion: Sees.TENSORS,
    users.AdaBelief: Sees.TENSORS,
    users.Shampoo: Sees.TENSORS,
    users.Lamb: Sees.MODEL,
    users.Prodigy: Sees.MODEL,
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_over_chunks_what_it_does_over_whole_tensors(kind: type[users.Bare]) -> None:
    model = model_of(SHAPES).double()
    optimizer = kind(groups_of(model))
    assert traits_of(optimizer).sees is KINDS[kind]
    sharded = Sharded(model, optimizer)
    assert (len(sharded.layout.chunks) == 1) == (KINDS[kind] is Sees.MODEL)
    plain_groups = [dict(group) for group in optimizer.param_groups]
    other = kind(plain_groups)
    for number, gradients in enumerate(gradients_of(model, 6, unused=("bias", 2))):
        gradients = {name: gradient.double() for name, gradient in gradients.items()}
        if number == 4:
            sharded.optimizer.forget()  # as a survivor does, who reads everything from the arena
        sharded.step(gradients)
        plain_step(model, other, gradients)
    assert_same(sharded, model, other)
    sharded.optimizer.give_state()
    for own, group in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert own.keys() == group.keys()
        for key in own.keys() - {"params"}:
            assert own[key] == pytest.approx(group[key]), key


def test_at_a_rate_of_zero_it_is_seen_all_the_same() -> None:
    """A warmup begins there."""
    model = model_of(SHAPES)
    assert traits_of(users.Lamb(model.parameters(), lr=0.0)).sees is Sees.MODEL


def test_state_that_comes_late_is_refused_when_it_comes() -> None:
    model = model_of({"weight": (3, 4)})
    sharded = Sharded(model, users.Late(model.parameters()))
    steps = list(gradients_of(model, 10))
    for gradients in steps[:9]:
        sharded.step(gradients)
    with pytest.raises(ModelError, match="optimizer is 'Late': it keeps 'surprise' for some tensors only, or not from"):
        sharded.step(steps[9])


def test_one_that_sees_all_tensors_wants_them_of_one_type() -> None:
    model = nn.ParameterDict({"one": torch.ones(3), "other": torch.ones(3).double()})
    with pytest.raises(ModelError, match="it looks at all tensors at once, and these are of types float32, float64;"):
        Sharded(model, users.Lamb(model.parameters()))


REFUSED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "closure": (users.Sam, "step() with gradients and nothing else, which ends in AssertionError (it needs a closure)"),
    "noise": (users.Langevin, "it draws random numbers, which are others on every owner"),
    "attribute": (users.Counting, "it changes its attribute 'count', which owners do not share"),
    "wrapper": (
        lambda parameters: users.Lookahead(torch.optim.SGD(parameters, lr=0.1)),
        "it wraps an optimizer of its own (optimizer: SGD), which owners do not see; give Trainer that one",
    ),
    "list": (users.Listing, "it keeps its parameters in 'listed' beside its groups"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_that_owners_cannot_run_is_refused_before_training(case: str) -> None:
    make, sentence = REFUSED[case]
    model = model_of({"weight": (3, 4), "bias": (4,)})
    with pytest.raises(ModelError) as raised:
        Sharded(model, make(model.parameters()))
    assert sentence in str(raised.value)


def test_what_is_no_optimizer_of_torch_is_refused() -> None:
    with pytest.raises(ModelError, match=r"optimizer is 'object': give one of torch\.optim, or a subclass"):
        grouped_parameters(nn.Linear(2, 2), object())  # type: ignore[arg-type]


TRAINING = """
import json
import torch
from torch import nn
import paceline as pl
from optim import users_optimizers as users

for kind in (users.Adan, users.Lamb, users.Prodigy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1)).double()
    trainer = pl.Trainer(model, kind(model.parameters()), lambda model, x: (model(x) - x.sum(1, True)).square().mean())
    data, losses = torch.randn(32, 6, dtype=torch.float64), []
    for epoch in range(2):
        for batch in trainer.batches(data, batch_size=8):
            losses.append(trainer.step(batch))
        trainer.save(f"{kind.__name__}.safetensors")
    print(json.dumps({kind.__name__: losses}))
    trainer.close()
"""


def test_two_replicas_train_with_them_as_one_process_does(start: Start) -> None:
    plain, mirrored = start(TRAINING, None), start(TRAINING, "--replicas 2")
    plain.fine(), mirrored.fine()
    for kind in ("Adan", "Lamb", "Prodigy"):
        assert mirrored.told(kind) == pytest.approx(plain.told(kind), rel=1e-9), kind
