"""A model in int8 as an ONNX file, for phones and other programs; and that file, run in onnxruntime.

Where a layer is in int8 the file has the whole numbers and their scales, behind `DequantizeLinear`, and its input goes
through `QuantizeLinear` and back: what every runtime for ONNX knows how to compute in int8. Here, while the model is
exported, modules that say so stand in the place of those that compute.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import ModelError
from paceline.quantize.int8_convolution import Int8Convolution
from paceline.quantize.int8_layer import Int8Layer
from paceline.quantize.int8_linear import Int8Linear
from paceline.quantize.int8_recurrent import Int8Recurrent
from paceline.quantize.rounding import InputRange, Int8Weight
from paceline.quantize.swaps import places_of, put_into
from paceline.split.cut import Example
from paceline.torch_private import TreeSpec, tree_flatten, tree_unflatten


def export_onnx(model: nn.Module, call: Example, path: Path) -> OnnxModel:
    """Writes the model, called so with two samples or more, as a file; returns what answers by it."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Recurrent):
            expected = f"{name} is a {module.mode} in int8, which ONNX has no form for: add --float {name}"
            raise ModelError("export", "onnx", expected)
        if isinstance(module, Int8Linear | Int8Convolution) and not module.ranges:
            raise ModelError("export", "onnx", "it says how inputs are rounded, use --activations calibrated")
    leaves, spec = tree_flatten(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    with torch.no_grad():
        answer = tree_flatten(model(*call[0], **call[1]))
    batch: list[Any] = [{0: torch.export.Dim.AUTO} if tensor.dim() else {} for tensor in tensors]
    with _exportable(model), _quiet():
        try:
            program = torch.onnx.export(
                _Answers(model, leaves, spec),
                tuple(tensors),
                dynamo=True,
                input_names=_input_names(model, call),
                dynamic_shapes={"tensors": tuple(batch)},
                external_data=False,
            )
            assert program is not None
            unfinished = path.with_name(f"{path.name}.unfinished")
            program.save(str(unfinished))
            os.replace(unfinished, path)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError("export", "onnx", f"torch cannot write this model as ONNX ({reason})") from error
    return OnnxModel(path, *answer)


class OnnxModel(nn.Module):
    """Answers by an ONNX file, in onnxruntime on one core, to whoever calls it like the model that was exported."""

    def __init__(self, path: Path, example: Sequence[Any], spec: TreeSpec) -> None:
        """`example`, `spec`: an answer of the model's, whose tensors are those of the file."""
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._example, self._spec = example, spec
        self._inputs = [it.name for it in self._session.get_inputs()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        feed = {name: tensor.detach().numpy() for name, tensor in zip(self._inputs, given, strict=True)}
        found = iter([torch.from_numpy(array) for array in self._session.run(None, feed)])
        leaves = [next(found) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._example]
        return tree_unflatten(leaves, self._spec)


class _Answers(nn.Module):
    """The model, called with tensors alone: whatever else is in a call is always the same."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> None:
        super().__init__()
        self.model, self._leaves, self._call = model, list(leaves), spec

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._call)
        found = tree_flatten(self.model(*args, **kwargs))[0]
        return tuple(leaf for leaf in found if isinstance(leaf, torch.Tensor))


class _OnnxLinear(nn.Module):
    def __init__(self, layer: Int8Linear) -> None:
        super().__init__()
        self.rounded = _Rounded(layer.ranges[0])
        self.weight = _Weight(layer.matrix)
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.rounded(x), self.weight(), self.bias)


class _OnnxConvolution(nn.Module):
    def __init__(self, layer: Int8Convolution) -> None:
        super().__init__()
        self.rounded = _Rounded(layer.ranges[0])
        self.weight = _Weight(layer.weights["weight"])
        self.bias, self.shape, self.lines = layer.bias, layer.shape, layer.lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        convolve = F.conv1d if self.lines else F.conv2d
        return convolve(self.rounded(x), self.weight(), self.bias, *self.shape)


class _Rounded(nn.Module):
    """What an input means once it is rounded."""

    step: torch.Tensor
    zero: torch.Tensor

    def __init__(self, rounding: InputRange) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(rounding.step))
        self.register_buffer("zero", torch.tensor(rounding.zero, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = torch.onnx.ops.symbolic("QuantizeLinear", (x, self.step, self.zero), dtype=torch.uint8, shape=x.shape)
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (whole, self.step, self.zero), dtype=torch.float32, shape=x.shape
        )


class _Weight(nn.Module):
    """What a weight in int8 means, with a scale for each channel of its first dim."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__()
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales.flatten().contiguous())

    def forward(self) -> torch.Tensor:
        return torch.onnx.ops.symbolic(
            "DequantizeLinear", (self.values, self.scales), {"axis": 0}, dtype=torch.float32, shape=self.values.shape
        )


@contextlib.contextmanager
def _exportable(model: nn.Module) -> Iterator[None]:
    """Inside, layers in int8 are those that say in ONNX what they do."""
    with contextlib.ExitStack() as put_back:
        layers = [module for module in model.modules() if isinstance(module, Int8Layer)]
        for layer in layers:
            twin: nn.Module | None = None
            if isinstance(layer, Int8Linear):
                twin = _OnnxLinear(layer)
            elif isinstance(layer, Int8Convolution):
                twin = _OnnxConvolution(layer)
            if twin is not None:
                places = places_of(model, layer)
                put_into(places, twin)
                put_back.callback(put_into, places, layer)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the exporter says of its progress to itself."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _input_names(model: nn.Module, call: Example) -> list[str]:
    """Returns a name for each tensor of a call: that of the parameter of `forward` that it is given for."""
    args, kwargs = call
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    names: list[str] = []
    for name, value in given.items():
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        names += [name] if len(tensors) == 1 else [f"{name}_{at}" for at in range(len(tensors))]
    return names
