"""Every kind of layer in int8: it computes what its rounded numbers mean, and takes what torch's own takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.quantize.choosing import difference_of
from paceline.quantize.int8_convolution import Int8Convolution
from paceline.quantize.int8_linear import Int8Linear
from paceline.quantize.layers import find_layers
from paceline.quantize.swaps import Swap, find_norms
from tests.quantize.models_to_quantize import Attention, Recurrent, Residual, TiedWords, has_int8, with_statistics


def swapped(model: nn.Module, answer: Callable[[], Any], *, dynamic: bool = False) -> list[Swap]:
    """Puts every layer of the model into int8 that can be, calibrated on one answer."""
    layers = find_layers(model)
    norms = find_norms(model, layers, answer)
    swaps = [Swap(model, layer, norms.get(layer.name)) for layer in layers if layer.kind is not None]
    for swap in swaps:
        swap.layer.begin_look()
        swap.put(int8=True)
    answer()
    for swap in swaps:
        assert swap.layer.end_look(dynamic=dynamic) is None
    return swaps


def off_by(model: nn.Module, *given: Any, dynamic: bool = False, **named: Any) -> float:
    """How far answers in int8 are from those in float; afterwards the model is as it was."""
    torch.manual_seed(1)
    model.eval()
    with torch.no_grad():
        exact = model(*given, **named)
        swaps = swapped(model, lambda: model(*given, **named), dynamic=dynamic)
        assert swaps
        assert has_int8(model)
        found = difference_of(exact, model(*given, **named))
        for swap in swaps:
            swap.put(int8=False)
        assert difference_of(exact, model(*given, **named)) == 0
    return found


def test_a_linear_layer_computes_what_its_rounded_numbers_mean() -> None:
    model = nn.Sequential(nn.Linear(33, 17))
    x = torch.randn(2, 5, 33)
    with torch.no_grad():
        swapped(model, lambda: model(x))
        layer = model[0]
        assert isinstance(layer, Int8Linear)
        rounding = layer.ranges[0]
        exact = F.linear(rounding.back(rounding.rounded(x)), layer.weight, layer.bias)
        assert torch.allclose(model(x), exact, atol=1e-5)
        assert torch.allclose(model(x[0, 0]), exact[0, 0], atol=1e-5)
        assert model(x[:0]).shape == (0, 5, 17)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 8, (3, 5), stride=(2, 1), padding="valid", dilation=(1, 2), groups=2, bias=False),
        nn.Conv2d(4, 4, 3, groups=4, padding="same"),
    ],
    ids=str,
)
def test_a_convolution_computes_what_its_rounded_numbers_mean(module: nn.Conv2d) -> None:
    model = nn.Sequential(module).eval()
    x = torch.randn(2, 4, 11, 12)
    with torch.no_grad():
        plain = copy.deepcopy(module)
        swapped(model, lambda: model(x))
        layer = model[0]
        assert isinstance(layer, Int8Convolution)
        plain.weight.data = layer.weight
        rounding = layer.ranges[0]
        exact = plain(rounding.back(rounding.rounded(x)))
        assert torch.allclose(model(x), exact, atol=1e-4)
        assert model(x).is_contiguous()
        assert torch.allclose(model(x[0]), exact[0], atol=1e-4)
        assert model(x[:, :, :7]).shape == plain(x[:, :, :7]).shape  # another size than the first


def masks() -> dict[str, dict[str, Any]]:
    causal = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    padding = torch.arange(7).expand(3, 7) >= torch.tensor([[7], [4], [6]])
    return {
        "none": {},
        "padding, causal": {"key_padding_mask": padding, "attn_mask": causal, "need_weights": False},
        "by head": {"attn_mask": torch.randn(12, 7, 7), "average_attn_weights": False},
    }


@pytest.mark.parametrize("which", masks())
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_takes_every_mask(which: str, batch_first: bool) -> None:
    x = torch.randn(3, 7, 32) if batch_first else torch.randn(7, 3, 32)
    assert 0 < off_by(Attention(batch_first), x, x, x, **masks()[which]) < 0.03


def test_attention_to_something_else_and_without_a_batch() -> None:
    x, other = torch.randn(3, 7, 32), torch.randn(3, 5, 20)
    assert 0 < off_by(Attention(kdim=20), x, other, other) < 0.03
    assert 0 < off_by(Attention(), x[0], x[0], x[0]) < 0.03


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("how", [{"batch_first": True}, {"bidirectional": True, "bias": False}], ids=str)
def test_recurrent_layers_take_sequences_states_and_packed_ones(kind: type[nn.RNNBase], how: dict[str, Any]) -> None:
    model = Recurrent(kind, **how)
    x = torch.randn(3, 9, 16)
    assert 0 < off_by(model, x) < 0.05
    assert 0 < off_by(model, x[0]) < 0.05
    rows = 3 if how.get("batch_first") else 9
    state = torch.rand(2 * (1 + how.get("bidirectional", False)), rows, 24)
    assert 0 < off_by(model, x, (state, state) if kind is nn.LSTM else state) < 0.05
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 16) for n in (3, 7, 5)], enforce_sorted=False)
    assert 0 < off_by(model, packed) < 0.05


def test_torchs_encoder_asks_its_modules_if_they_are_in_int8_and_computes_by_itself_if_not() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert 0 < off_by(model, torch.randn(3, 7, 32)) < 0.03
    assert model.layers[0].activation_relu_or_gelu == 1
    assert 0 < off_by(nn.Transformer(32, 4, 1, 1, 64, batch_first=True), *torch.randn(2, 3, 7, 32)) < 0.05


def test_words_that_are_answers_too_and_inputs_rounded_by_each_request() -> None:
    text = torch.randint(40, (4, 9))
    assert 0 < off_by(TiedWords(), text) < 0.05
    assert 0 < off_by(TiedWords(), text, dynamic=True) < 0.05
    tied = [layer.tied for layer in find_layers(TiedWords())]
    assert tied == [["words", "head"], [], ["words", "head"]]


def test_a_batchnorm_is_part_of_a_layer_only_if_nobody_else_takes_what_that_gives() -> None:
    model = with_statistics(Residual())
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert find_norms(model, find_layers(model), lambda: model(images)) == {"second": "own"}
        alone = with_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)))
        assert find_norms(alone, find_layers(alone), lambda: alone(images)) == {"0": "1"}
    assert 0 < off_by(alone, images) < 0.03
    assert 0 < off_by(model, images) < 0.03  # with a weight norm, too
    wide = with_statistics(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)))
    assert 0 < off_by(wide, torch.randn(4, 8)) < 0.03


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_computes_in_its_own_way_stays_in_float_and_why() -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict(
        {
            "doubled": Doubled(4, 4),
            "hooked": hooked,
            "wide": nn.Linear(4, 4).double(),
            "bounded": nn.Embedding(4, 4, max_norm=1.0),
            "mirrored": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            "uneven": nn.Conv1d(4, 4, 2, padding="same"),
            "short": nn.LSTM(4, 4, proj_size=2),
            "plain": nn.RNN(4, 4),
            "more": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "fine": nn.Conv1d(4, 4, 3),
        }
    )
    found = {layer.name: layer.refusal for layer in find_layers(model)}
    assert found.pop("fine") == ""
    words = ("own way", "hooks", "float64", "max_norm", "reflect", "both sides", "proj_size", "own way", "keys")
    for (name, refusal), word in zip(found.items(), words, strict=True):
        assert word in refusal, (name, refusal)
    assert "nn.Sequential" in find_layers(nn.Linear(4, 4))[0].refusal
