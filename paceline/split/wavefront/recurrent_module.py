"""How a recurrent module's own forward comes to make a wave.

nn.LSTM.forward and its like sort out their arguments (no batch, batch first, packed sequences, no first states) and
then call one function of torch. The module keeps its forward; just that call goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.errors import DataError, ModelError
from paceline.exchange.mailboxes import Peers
from paceline.split.wavefront.layers import GRU, LSTM, RecurrentLayer, Relu, Tanh
from paceline.split.wavefront.time_blocks import TimeBlocks
from paceline.split.wavefront.wave import Wave, waved

Tensor = torch.Tensor
KINDS: dict[Any, type[RecurrentLayer]] = {torch.lstm: LSTM, torch.gru: GRU, torch.rnn_tanh: Tanh, torch.rnn_relu: Relu}


class RecurrentModule:
    """A recurrent module of several layers, as one device computes it."""

    def __init__(self, name: str, module: nn.RNNBase, own: range, peers: Peers, time_block: int) -> None:
        """`own` are the layers of this device."""
        self._name = name
        self._module = module
        self._own = own
        self._peers = peers
        self._time_block = time_block

    def replace_forward(self, at_work: Callable[[], bool], *, compiled: bool) -> None:
        """Lets the module's forward make waves while `at_work()`. If the model is `compiled`, its compiler goes around
        the module."""
        # A model may be cut again, by another trainer: what counts is the forward that it came with.
        whole: Callable[..., Any] = getattr(self._module.forward, "whole", self._module.forward)

        def in_waves(*args: Any, **kwargs: Any) -> Any:
            if not at_work():
                return whole(*args, **kwargs)
            with _Redirected(self):
                return whole(*args, **kwargs)

        forward: Any = torch.compiler.disable(in_waves) if compiled else in_waves  # type: ignore[no-untyped-call]
        forward.whole = whole
        self._module.forward = forward

    def owns(self, weights: Any) -> bool:
        """Returns whether these are the module's own weights: what else its forward may compute stays as it is."""
        return len(weights) > 0 and weights[0] is self._module.weight_ih_l0

    def run(
        self,
        kind: type[RecurrentLayer],
        x: Tensor,
        sizes: Sequence[int],
        states: Sequence[Tensor],
        options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        """Returns output and final states. `x` are rows of all steps, `sizes` of each; `options` are as torch's
        function takes them."""
        weights, bias, layers, dropout, training = options[:5]
        if torch.is_autocast_enabled("cpu"):
            raise ModelError(
                "autocast", "on", f"the wavefront does not know it, leave it before the model comes to {self._name}"
            )
        if not sizes:
            raise DataError("input", "empty", f"give {self._name} sequences of one step or more")
        steps = TimeBlocks(sizes)
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *states, *weights))
        masks: list[Tensor | None] = [None] * layers
        if training and dropout:
            # As in one process: one for every layer's whole output but the last one's, from the first layer up. Those
            # of other devices' layers too, so that random numbers go on alike on all.
            shape = steps.count, states[0].size(2)
            drawn = [torch.dropout(x.new_ones(shape), dropout, True) for _ in range(layers - 1)]
            masks = [mask if layer in self._own else None for layer, mask in enumerate([*drawn, None])]
        wave = Wave(self._peers, kind, self._own, steps, self._time_block, masks, keep=keep)
        each = len(weights) // layers
        own = weights[self._own.start * each : self._own.stop * each]
        output, finals = waved(wave, x, states, own, bias)
        return output, *finals


class _Redirected(TorchFunctionMode):
    """Makes a wave where torch's function for whole stacks is called with this module's weights."""

    def __init__(self, recurrent: RecurrentModule) -> None:
        super().__init__()
        self._recurrent = recurrent

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        x, *others = args
        packed = not isinstance(others[2], bool)
        sizes = others.pop(0).tolist() if packed else None
        first, *options = others
        if not self._recurrent.owns(options[0]):
            return func(*args, **(kwargs or {}))
        states = list(first) if isinstance(first, (list, tuple)) else [first]
        if sizes is not None:
            return self._recurrent.run(kind, x, sizes, states, tuple(options))
        batch_first = options[-1]
        steps_first = x.transpose(0, 1) if batch_first else x
        length, batch, width = steps_first.shape
        rows = steps_first.reshape(length * batch, width)
        output, *finals = self._recurrent.run(kind, rows, [batch] * length, states, tuple(options))
        output = output.view(length, batch, output.size(1))
        return output.transpose(0, 1) if batch_first else output, *finals
