"""The file of a model in int8: what is in it, who can read it, and one sentence for whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline import checkpoint
from paceline.checkpoint_note import CheckpointNote, read_note
from paceline.errors import CheckpointError, InvalidInput, ModelError
from paceline.loop.validation import ValidationSet
from paceline.quantize.choosing import difference_of
from paceline.quantize.quantizing import quantize
from paceline.quantize.values import QuantizeReport, QuantizeRequest
from tests.quantize.models_to_quantize import Residual, TiedWords, has_int8, with_statistics

Make = Callable[[], nn.Module]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 96, bias=False), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 6))
    return with_statistics(model)


def words() -> nn.Module:
    torch.manual_seed(0)
    return TiedWords().eval()


def images() -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(Residual())


def spoiled() -> nn.Module:
    """Its first layer has a weight that dwarfs the others of its row, and does not matter: its input is 0."""
    model = mlp()
    model[0].weight.data[:, 0] = 300.0
    return model


INPUTS = {
    mlp: torch.randn(64, 24, generator=torch.Generator().manual_seed(5)),
    words: torch.randint(40, (24, 9), generator=torch.Generator().manual_seed(5)),
    images: torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(5)),
}


MODELS = [mlp, words, images]
INPUTS[spoiled] = INPUTS[mlp] * torch.tensor([0.0] + [1.0] * 23)


def agreement(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


def set_of(make: Make) -> ValidationSet:
    """Samples of which the model in float answers all as it should."""
    x = INPUTS[make]
    with torch.no_grad():
        y = make()(x).argmax(-1)
    load = lambda part: (x[part.start : part.stop], y[part.start : part.stop])  # noqa: E731
    return ValidationSet(load, len(x), 16, agreement, agreement, "agreement")


def quantized(make: Make, folder: Path, **asked: Any) -> Any:
    checkpoint.write_model(folder / "m.safetensors", make().state_dict(), {})
    given = {"max_drop": 100.0, **asked}
    out = folder / "m-int8.safetensors"
    return quantize(request_for(folder / "m.safetensors", out, **given), make(), set_of(make)), out


def request_for(path: Path, out: Path, **asked: Any) -> QuantizeRequest:
    return QuantizeRequest(checkpoint=str(path), out=str(out), script="", made=CheckpointNote(["--deep"]), **asked)


@pytest.mark.parametrize("make", MODELS)
def test_a_file_is_loaded_into_modules_that_compute_in_int8_and_answers_what_was_measured(
    make: Make, tmp_path: Path
) -> None:
    report, path = quantized(make, tmp_path)
    assert isinstance(report, QuantizeReport)
    model = make()
    with torch.no_grad():
        exact = model(INPUTS[make])
    predictor = pl.load(path, model)
    assert has_int8(model)
    assert 0 < difference_of(exact, predictor(INPUTS[make])) < 0.1
    assert set_of(make).measured(model) == report.after.value
    assert path.stat().st_size == report.after.bytes
    assert read_note(path).arguments == ["--deep"]
    assert read_note(path).metrics == {"agreement": report.after.value}


@pytest.mark.parametrize("make", MODELS)
def test_plain_torch_reads_it_by_a_product(make: Make, tmp_path: Path) -> None:
    """As docs/quantize.md shows it."""
    _, path = quantized(make, tmp_path)
    state = load_file(path)
    plain = {
        name: tensor.float() * state[f"{name}.scale"] if f"{name}.scale" in state else tensor
        for name, tensor in state.items()
        if not name.endswith(".scale")
    }
    for name, tensor in make().state_dict().items():
        if name in plain and state[name].dtype == torch.int8 and make is words:
            assert (plain[name] - tensor).abs().max() <= tensor.abs().max() / 127 / 2 + 1e-6
    assert all(tensor.dtype == torch.int8 for name, tensor in state.items() if f"{name}.scale" in state)
    if make is words:  # what is tied is there once
        assert ("words.weight" in state) != ("head.weight" in state)


@pytest.mark.parametrize("make", MODELS)
def test_a_model_that_will_be_cut_has_the_same_weights_in_float(make: Make, tmp_path: Path) -> None:
    _, path = quantized(make, tmp_path)
    model, cut = make(), make()
    pl.load(path, model)
    with pytest.warns(UserWarning, match="computes in float"):
        pl.load(path, cut, split=pl.Stages(stages=1))
    assert not has_int8(cut)
    with torch.no_grad():
        assert 0 < difference_of(model(INPUTS[make]), cut(INPUTS[make])) < 0.1
    if make is words:
        return
    names = [name for name, module in cut.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for name in names:
        assert torch.equal(cut.get_submodule(name).weight, model.get_submodule(name).weight)


def test_sensitive_layers_stay_in_float_until_the_metric_is_within_its_bound(tmp_path: Path) -> None:
    loose, _ = quantized(spoiled, tmp_path)
    report, path = quantized(spoiled, tmp_path, max_drop=1.0)
    assert loose.drop > 1.0 >= report.drop
    assert [(layer.name, layer.int8, layer.why) for layer in report.layers] == [
        ("0", False, "too much is lost"),
        ("3", True, ""),
    ]
    model = mlp()
    pl.load(path, model)
    assert [type(module).__name__ for module in model] == ["Linear", "BatchNorm1d", "ReLU", "Int8Linear"]
    worst, values = set_of(mlp), iter([1.0, 0.5, 0.88])
    worst.measured = lambda _: next(values)  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="with only 3 in int8 it drops by 12 points already, give more"):
        quantize(request_for(tmp_path / "m.safetensors", path, max_drop=0.0), mlp(), worst)


def test_layers_by_name_stay_in_float(tmp_path: Path) -> None:
    report, _ = quantized(words, tmp_path, keep=["he*"])
    assert {layer.name: layer.int8 for layer in report.layers} == {"words": False, "cells": True, "head": False}
    with pytest.raises(InvalidInput, match="float is 'heat': no layer has such a name, they are words, cells, head"):
        quantized(words, tmp_path, keep=["heat"])


def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path: Path) -> None:
    _, path = quantized(mlp, tmp_path)

    def asked(path: Path, make: Make = mlp) -> None:
        request = QuantizeRequest(
            checkpoint=str(path), out=str(tmp_path / "o.safetensors"), script="", made=CheckpointNote()
        )
        quantize(request, make(), set_of(make))

    with pytest.raises(CheckpointError, match="is in int8 already: give the checkpoint that it was made of"):
        asked(path)
    with pytest.raises(CheckpointError, match=r"has no tensor 'cells.bias_hh_l0', unlike the model"):
        asked(tmp_path / "m.safetensors", words)
    state = mlp().state_dict()
    state["3.weight"][2, 2] = torch.nan
    checkpoint.write_model(tmp_path / "nan.safetensors", state, {})
    with pytest.raises(CheckpointError, match=r"not finite in '3.weight'"):
        asked(tmp_path / "nan.safetensors")
    (tmp_path / "none.safetensors").write_bytes(b"not at all")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        asked(tmp_path / "none.safetensors")
    assert not (tmp_path / "o.safetensors").exists()


def test_what_is_wrong_with_a_file_in_int8_is_said(tmp_path: Path) -> None:
    _, path = quantized(mlp, tmp_path)
    with pytest.raises(CheckpointError, match="a layer '0', unlike the model"):
        pl.load(path, words())
    wider = nn.Sequential(nn.Linear(24, 97, bias=False), nn.BatchNorm1d(97), nn.ReLU(), nn.Linear(97, 6))
    with pytest.raises(CheckpointError, match=r"'0.weight' of shape \[96, 24\], and the model of \[97, 24\]"):
        pl.load(path, wider)
    other = nn.Sequential(nn.Conv1d(24, 96, 1), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 6))
    with pytest.raises(CheckpointError, match="'0' as a linear in int8, and the model has a Conv1d there"):
        pl.load(path, other)
    tensors, notes = checkpoint.read_noted_model(path)
    for change, sentence in (
        (lambda t, n: n["int8"].pop("layers"), "its notes are not as they should be"),
        (lambda t, n: n["int8"]["tied"].update(a="b"), "its notes are not as they should be"),
        (
            lambda t, n: t.update({"3.weight.scale": torch.ones(5, 1)}),
            "'3.weight' and its scales do not",
        ),
        (lambda t, n: t.update({"more": torch.ones(1)}), "has a tensor 'more', unlike the model"),
    ):
        changed, noted = dict(tensors), msgspec.json.decode(msgspec.json.encode(notes))
        change(changed, noted)
        checkpoint.write_model(tmp_path / "changed.safetensors", changed, noted)
        with pytest.raises(CheckpointError, match=sentence):
            pl.load(tmp_path / "changed.safetensors", mlp())
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        pl.load(path, mlp())


def test_nothing_is_trained_on_from_a_file_in_int8(tmp_path: Path) -> None:
    _, path = quantized(mlp, tmp_path)
    with pytest.raises(CheckpointError, match="holds a model and no training: go on from the checkpoint"):
        checkpoint.read(path)
