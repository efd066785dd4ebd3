"""One recurrent layer at one time block, forward and backward, in plain torch operations.

torch's own kernels work on whole sequences: called block by block they would prepare the weights anew for each block,
and add up the weights' gradients. Here the input's share of all gates of a block is one product, each step adds the
hidden state's, and the weights' gradients are left for the end: one product over all of time, for which nobody waits.

The equations are those of torch.nn.LSTM, GRU and RNN, to the order of the gates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.split.wavefront.packed_matrix import PackedMatrix
from paceline.split.wavefront.time_blocks import TimeBlocks

Tensor = torch.Tensor
_aten = torch.ops.aten


class Weights(NamedTuple):
    """The weights of one layer."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None  # the projection of an LSTM's output

    @classmethod
    def of(cls, tensors: Sequence[Tensor], bias: bool) -> Weights:
        """Returns them, from torch's list of a layer's weights."""
        ih, hh, *others = tensors
        return cls(ih, hh, *others) if bias else cls(ih, hh, None, None, *others)


class RecurrentLayer:
    """One layer's way through the blocks of one call. Kinds differ in a step, and in a step of backward."""

    def __init__(self, weights: Weights, states: Sequence[Tensor], steps: TimeBlocks, *, keep: bool) -> None:
        """`states` are those before the first step; `keep` says that backward will follow."""
        self.weights = weights
        self._hidden = weights.hh.size(0) // self.gates
        self._batch = len(states[0])
        self._hh = PackedMatrix(weights.hh, self._batch)
        self._ih = PackedMatrix(weights.ih, self._batch)
        self._steps = steps
        self._keep = keep
        self._states = list(states)
        self._finals = [torch.empty_like(state) for state in states]
        self._inputs: list[Tensor] = []
        self._kept: list[tuple[Any, ...]] = []  # by step: the hidden state before it, and what its backward needs

    gates = 1  # whose weights lie one below the other

    # ── forward, block by block ──────────────────────────────────────────────────────────────────────────

    def forward(self, x: Tensor, block: range) -> Tensor:
        """Returns the output's rows of the next block."""
        gates = self._ih.times(x, self._input_bias())
        y = x.new_empty(len(x), self._states[0].size(1))
        for rows in self._steps.within(block):
            self._end_at(rows.stop - rows.start)
            kept = self._step(gates[rows], y[rows])
            if self._keep:
                self._kept.append(kept)
        if self._keep:
            self._inputs.append(x)
        return y

    def finals(self) -> list[Tensor]:
        """Returns the states after each sequence's last step."""
        self._end_at(0)
        return self._finals

    def _end_at(self, size: int) -> None:
        """Lets only the first `size` sequences go on."""
        if size < len(self._states[0]):
            for number, (state, final) in enumerate(zip(self._states, self._finals, strict=True)):
                final[size : len(state)] = state[size:]
                self._states[number] = state[:size]

    def _input_bias(self) -> Tensor | None:
        bias, other = self.weights.bias_ih, self.weights.bias_hh
        return bias + other if bias is not None and other is not None else None

    def _step(self, gates: Tensor, y: Tensor) -> tuple[Any, ...]:
        """Goes from the input's share of the gates to the states after the step, the hidden one in `y`. Returns what
        backward needs."""
        raise NotImplementedError

    # ── backward, from the last block to the first ───────────────────────────────────────────────────────

    def begin_backward(self, finals: Sequence[Tensor]) -> None:
        """Takes the gradients of the states after the last steps."""
        self._of_finals = finals
        self._of_states = [final[:0] for final in finals]
        rows = self._steps.count
        self._hh_back = PackedMatrix(self.weights.hh.t(), self._batch)
        self._ih_back = PackedMatrix(self.weights.ih.t(), self._batch)
        self._of_input_gates = self._of_hidden_gates = finals[0].new_empty(rows, self.gates * self._hidden)

    def backward(self, dy: Tensor, block: range, *, wanted: bool) -> Tensor | None:
        """Returns the gradient of the block's input, if it is wanted."""
        place = self._steps.rows(block)
        of_input, of_hidden = self._of_input_gates[place], self._of_hidden_gates[place]
        for step, rows in reversed(list(zip(block, self._steps.within(block), strict=True))):
            self._begin_at(rows.stop - rows.start)
            self._step_back(self._of_states[0] + dy[rows], self._kept[step], of_input[rows], of_hidden[rows])
        return self._ih_back.times(of_input) if wanted else None

    def of_first_states(self) -> list[Tensor]:
        """Returns, when all blocks are done, the gradients of the states before the first step."""
        return self._of_states

    def of_weights(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Returns the same of the weights, in their order, of those that are wanted."""
        of_input, of_hidden = self._of_input_gates, self._of_hidden_gates
        of_bias = functools.cache(lambda: of_input.sum(0))
        find: dict[str, Callable[[], Tensor]] = {
            "ih": lambda: of_input.t() @ torch.cat(self._inputs),
            "hh": lambda: of_hidden.t() @ torch.cat([kept[0] for kept in self._kept]),
            "bias_ih": of_bias,
            "bias_hh": lambda: of_bias().clone() if of_hidden is of_input else of_hidden.sum(0),
            "hr": self._of_projection,
        }
        given = zip(self.weights._fields, self.weights, strict=True)
        names = [name for name, weight in given if weight is not None]
        return [find[name]() if want else None for name, want in zip(names, wanted, strict=True)]

    def _begin_at(self, size: int) -> None:
        """Lets sequences that end with this step join those that go on after it."""
        have = len(self._of_states[0])
        if have < size:
            pairs = zip(self._of_states, self._of_finals, strict=True)
            self._of_states = [torch.cat([state, final[have:size]]) for state, final in pairs]

    def _step_back(self, dh: Tensor, kept: tuple[Any, ...], of_input: Tensor, of_hidden: Tensor) -> None:
        """Goes from the gradient of the hidden state after a step to those of its gates, and of the states before
        it."""
        raise NotImplementedError

    def _of_projection(self) -> Tensor:
        raise NotImplementedError


class LSTM(RecurrentLayer):
    """A layer of nn.LSTM, with or without a projection."""

    gates = 4  # in, forget, cell, out

    def begin_backward(self, finals: Sequence[Tensor]) -> None:
        super().begin_backward(finals)
        self._of_outputs: list[Tensor] = []  # from the last step to the first, of the output that was projected

    def _step(self, gates: Tensor, y: Tensor) -> tuple[Any, ...]:
        (h, c), hidden = self._states, self._hidden
        gates = self._hh.times_plus(h, gates)
        gates[:, : 2 * hidden].sigmoid_()
        gates[:, 2 * hidden : 3 * hidden].tanh_()
        gates[:, 3 * hidden :].sigmoid_()
        i, f, g, o = gates.chunk(4, 1)
        after = (f * c).addcmul_(i, g)
        bent = after.tanh()
        m = None
        if self.weights.hr is None:
            torch.mul(o, bent, out=y)
        else:
            m = o * bent
            torch.mm(m, self.weights.hr.t(), out=y)
        self._states = [y, after]
        return h, gates, c, bent, m

    def _step_back(self, dh: Tensor, kept: tuple[Any, ...], of_input: Tensor, of_hidden: Tensor) -> None:
        _, gates, c, bent, m = kept
        i, f, g, o = gates.chunk(4, 1)
        di, df, dg, do = of_input.chunk(4, 1)
        if m is not None:
            self._of_outputs.append(dh)
            assert self.weights.hr is not None
            dh = dh @ self.weights.hr
        _aten.sigmoid_backward.grad_input(dh * bent, o, grad_input=do)
        dc = self._of_states[1] + _aten.tanh_backward(dh * o, bent)
        _aten.sigmoid_backward.grad_input(dc * g, i, grad_input=di)
        _aten.sigmoid_backward.grad_input(dc * c, f, grad_input=df)
        _aten.tanh_backward.grad_input(dc * i, g, grad_input=dg)
        self._of_states = [self._hh_back.times(of_hidden), dc * f]

    def _of_projection(self) -> Tensor:
        return torch.cat(self._of_outputs).t() @ torch.cat([kept[4] for kept in reversed(self._kept)])


class GRU(RecurrentLayer):
    """A layer of nn.GRU."""

    gates = 3  # reset, update, new

    def _input_bias(self) -> Tensor | None:
        return self.weights.bias_ih

    def begin_backward(self, finals: Sequence[Tensor]) -> None:
        super().begin_backward(finals)
        # The reset gate stands between the hidden state and the new gate: their gradients differ there.
        self._of_hidden_gates = torch.empty_like(self._of_input_gates)

    def _step(self, gates: Tensor, y: Tensor) -> tuple[Any, ...]:
        (h,), hidden, bias = self._states, self._hidden, self.weights.bias_hh
        of_hidden = self._hh.times(h, bias)
        gates[:, : 2 * hidden].add_(of_hidden[:, : 2 * hidden]).sigmoid_()
        r, z, n = gates.chunk(3, 1)
        before_reset = of_hidden[:, 2 * hidden :].clone()
        n.addcmul_(r, before_reset).tanh_()
        torch.sub(h, n, out=y).mul_(z).add_(n)
        self._states = [y]
        return h, gates, before_reset

    def _step_back(self, dh: Tensor, kept: tuple[Any, ...], of_input: Tensor, of_hidden: Tensor) -> None:
        h, gates, before_reset = kept
        r, z, n = gates.chunk(3, 1)
        dr, dz, dn = of_input.chunk(3, 1)
        _aten.tanh_backward.grad_input(dh * (1 - z), n, grad_input=dn)
        _aten.sigmoid_backward.grad_input(dh * (h - n), z, grad_input=dz)
        _aten.sigmoid_backward.grad_input(dn * before_reset, r, grad_input=dr)
        hidden = self._hidden
        of_hidden[:, : 2 * hidden] = of_input[:, : 2 * hidden]
        torch.mul(dn, r, out=of_hidden[:, 2 * hidden :])
        self._of_states = [self._hh_back.times_plus(of_hidden, dh * z)]


class Tanh(RecurrentLayer):
    """A layer of nn.RNN."""

    def _step(self, gates: Tensor, y: Tensor) -> tuple[Any, ...]:
        (h,) = self._states
        torch.tanh(self._hh.times_plus(h, gates), out=y)
        self._states = [y]
        return h, y

    def _step_back(self, dh: Tensor, kept: tuple[Any, ...], of_input: Tensor, of_hidden: Tensor) -> None:
        _aten.tanh_backward.grad_input(dh, kept[1], grad_input=of_input)
        self._of_states = [self._hh_back.times(of_hidden)]


class Relu(RecurrentLayer):
    """A layer of nn.RNN with nonlinearity="relu"."""

    def _step(self, gates: Tensor, y: Tensor) -> tuple[Any, ...]:
        (h,) = self._states
        torch.clamp_min(self._hh.times_plus(h, gates), 0, out=y)
        self._states = [y]
        return h, y

    def _step_back(self, dh: Tensor, kept: tuple[Any, ...], of_input: Tensor, of_hidden: Tensor) -> None:
        _aten.threshold_backward.grad_input(dh, kept[1], 0, grad_input=of_input)
        self._of_states = [self._hh_back.times(of_hidden)]
