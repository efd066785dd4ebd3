"""What a script computes with is widened to float64, and what it narrows itself is noticed."""

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.run_place import Recording
from paceline.verify.precision import AsItIs, InFloat64, open_precision


@pytest.fixture(autouse=True)
def own_default_dtype() -> object:
    yield
    torch.set_default_dtype(torch.float32)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(5))
        self.scale = torch.full((5,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x)) * self.mask * self.scale


def in_float64(*, tables: bool = False) -> AsItIs:
    return open_precision(Recording("", 1, dtype="float64", tables=tables), is_reference=True)


def test_parameters_buffers_constants_and_optimizer_state_become_float64_in_place() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    weight, values = model.embedding.weight, model.embedding.weight.detach().clone()
    in_float64().prepare(model, optimizer)
    assert model.head.weight is model.embedding.weight is weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(weight, values.double())
    assert {tensor.dtype for tensor in (weight, model.mask, model.scale, torch.zeros(1))} == {torch.float64}
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float64
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


def test_floating_tensors_of_a_batch_become_float64_and_the_rest_stays_as_it_is() -> None:
    label = torch.arange(2)
    batch = {"x": [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)], "y": (label, "name", None)}
    wide = in_float64().convert(batch)
    assert [x.dtype for x in wide["x"]] == [torch.float64] * 2
    assert wide["y"][0] is label
    assert wide["y"][1:] == ("name", None)
    assert in_float64().convert(torch.ones(1, dtype=torch.complex64)).dtype == torch.complex128


@pytest.mark.parametrize(
    ("inside", "narrow"),
    [
        (lambda x: x * 2, ""),
        (lambda x: (x > 0).float() * x, "float32"),
        (lambda x: x.to(torch.bfloat16).float(), "bfloat16"),
    ],
)
def test_a_loss_that_narrows_by_itself_is_noticed(inside: object, narrow: str) -> None:
    precision = in_float64()
    loss = precision.of(lambda model, batch: inside(batch).double().mean())  # type: ignore[operator]
    assert loss(nn.Identity(), torch.ones(3)).dtype == torch.float64
    assert precision.narrow == narrow


def test_a_table_on_servers_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_float64().prepare(model, optimizer)
    with pytest.raises(ModelError, match=r"0\.weight': a table on servers is of type float32"):
        in_float64(tables=True).prepare(model, optimizer)


def test_a_run_that_is_not_recorded_in_float64_is_left_as_it_is() -> None:
    for recording in (None, Recording("", 1)):
        precision = open_precision(recording, is_reference=True)
        assert not isinstance(precision, InFloat64)
        batch = (torch.ones(2),)
        assert precision.convert(batch) is batch
