"""`nn.LSTM` and `nn.GRU` in int8. Their kernel rounds what comes in by the numbers of each step; the range that was
found says how far those may reach at most, so that one odd sample of a batch cannot spoil the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from paceline.quantize import kernels
from paceline.quantize.int8_layer import Int8Layer, Tensors
from paceline.quantize.rounding import InputRange, Int8Weight

Hidden = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Int8Recurrent(Int8Layer):
    """Takes and returns what the module in whose place it is does."""

    kind = "recurrent"

    def __init__(
        self, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange], module: nn.RNNBase
    ) -> None:
        super().__init__(weights, floats, ranges)
        self.mode, self.batch_first, self.bidirectional = module.mode, module.batch_first, module.bidirectional
        self.num_layers, self.hidden_size, self.bias = module.num_layers, module.hidden_size, module.bias
        self.input_size = module.input_size
        self._cells = []
        for ending in _cells(module):
            zero = torch.zeros(len(self.weights[f"weight_ih_{ending}"].values))
            biases = (self.floats.get(f"bias_ih_{ending}", zero), self.floats.get(f"bias_hh_{ending}", zero))
            inputs, state = (self.weights[f"weight_{which}_{ending}"] for which in ("ih", "hh"))
            self._cells.append(kernels.pack_cell(inputs, state, biases))

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        given: Any = module
        if not _cells(module):
            return "its weights are computed by something else"
        return "it has a proj_size" if given.proj_size else None

    @staticmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        names = [f"{{}}_{which}_{ending}" for ending in _cells(module) for which in ("ih", "hh")]
        weights = {name.format("weight"): getattr(module, name.format("weight")).detach() for name in names}
        if not module.bias:
            return weights, {}
        return weights, {name.format("bias"): getattr(module, name.format("bias")).detach() for name in names}

    @classmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        assert isinstance(module, nn.RNNBase)
        return cls(weights, floats, ranges, module)

    def flatten_parameters(self) -> None:
        """Does nothing: scripts call it of a module on a GPU."""

    def forward(self, x: Any, hidden: Hidden | None = None) -> tuple[Any, Hidden]:
        if isinstance(x, PackedSequence):
            return self._of_packed(x, hidden)
        if x.dim() == 2:  # no batch
            batch = 0 if self.batch_first else 1
            before = _each(hidden, lambda it: it.unsqueeze(1))
            found, after = self.forward(x.unsqueeze(batch), before)
            return found.squeeze(batch), _each(after, lambda it: it.squeeze(1))
        rows = x.shape[0] if self.batch_first else x.shape[1]
        start = self._start(hidden, rows, x)
        settings = (True, self.num_layers, 0.0, False, self.bidirectional, self.batch_first)
        if self.mode == "LSTM":
            found, *state = torch.quantized_lstm(
                self._bounded(x), list(start), self._cells, *settings, dtype=torch.qint8, use_dynamic=True
            )
            return found, tuple(state)
        found, state = torch.quantized_gru(self._bounded(x), start[0], self._cells, *settings)
        return found, state

    def _of_packed(self, packed: PackedSequence, hidden: Hidden | None) -> tuple[PackedSequence, Hidden]:
        rows = int(packed.batch_sizes[0])
        order, back = packed.sorted_indices, packed.unsorted_indices
        if hidden is not None and order is not None:
            hidden = _each(hidden, lambda it: it.index_select(1, order))
        start = self._start(hidden, rows, packed.data)
        settings = (True, self.num_layers, 0.0, False, self.bidirectional)
        x = self._bounded(packed.data)
        state: Any
        if self.mode == "LSTM":
            found, *several = torch.quantized_lstm(
                x, packed.batch_sizes, list(start), self._cells, *settings, dtype=torch.qint8, use_dynamic=True
            )
            state = tuple(several)
        else:
            found, state = torch.quantized_gru(x, packed.batch_sizes, start[0], self._cells, *settings)
        if back is not None:
            state = _each(state, lambda it: it.index_select(1, back))
        return PackedSequence(found, packed.batch_sizes, order, back), state

    def _bounded(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks is not None:
            self.looks[0].see(x)
        return x.clamp(self.ranges[0].low, self.ranges[0].high) if self.ranges else x

    def _start(self, hidden: Hidden | None, rows: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if isinstance(hidden, tuple):
            return hidden
        if hidden is not None:
            return (hidden,)
        directions = 2 if self.bidirectional else 1
        zeros = x.new_zeros(self.num_layers * directions, rows, self.hidden_size)
        return (zeros, zeros)

    def extra_repr(self) -> str:
        return f"{self.mode}, {self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, int8"


def _cells(module: nn.Module) -> list[str]:
    """Returns the endings of parameters' names, a layer and direction each, in their order."""
    beginning = "weight_ih_"
    names = [name for name, _ in module.named_parameters(recurse=False) if name.startswith(beginning)]
    return [name.removeprefix(beginning) for name in names]


def _each(hidden: Hidden | None, change: Any) -> Any:
    if hidden is None:
        return None
    return tuple(map(change, hidden)) if isinstance(hidden, tuple) else change(hidden)
