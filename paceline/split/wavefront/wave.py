"""The order in which devices work at blocks, and what they send one another.

forward    a device takes a block from the one below, or of the input, and sends what its layers make of it to the one
           above; the last one sends the output to all. Then all tell all their final states.
backward   the mirror image: from the last block to the first, from the last device down; the first one sends the
           input's gradient to all. Gradients of weights come after all blocks, while others may still be at theirs.

All devices call this with the same tensors and need the same gradients: they agree on what is sent without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.exchange.mailboxes import Peers
from paceline.split.once_differentiable import once_differentiable
from paceline.split.wavefront.layers import RecurrentLayer, Weights
from paceline.split.wavefront.time_blocks import TimeBlocks

Tensor = torch.Tensor


class Wave:
    """One call of a recurrent module, as one device takes part in it."""

    def __init__(
        self,
        peers: Peers,
        kind: type[RecurrentLayer],
        own: range,
        steps: TimeBlocks,
        time_block: int,
        masks: Sequence[Tensor | None],
        *,
        keep: bool,
    ) -> None:
        """`own` are the layers of this device. `masks` are, by layer, what its output is multiplied with (dropout).
        `keep` says that backward may follow."""
        self.peers = peers
        self.kind = kind
        self.own = own
        self.steps = steps
        self.blocks = steps.blocks(time_block)
        self.masks = masks
        self.keep = keep
        self._at_work: list[RecurrentLayer] = []

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.peers.count) if rank != self.peers.rank]

    @property
    def _last(self) -> int:
        return self.peers.count - 1

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Weights]) -> tuple[Tensor, list[Tensor]]:
        """Returns all rows of the output, and the final states of all layers. `weights` are those of this device's."""
        self._at_work = [
            self.kind(own, [state[number] for state in states], self.steps, keep=self.keep)
            for number, own in zip(self.own, weights, strict=True)
        ]
        peers, outputs = self.peers, []
        for block in self.blocks:
            y = x[self.steps.rows(block)] if peers.rank == 0 else peers.receive(peers.rank - 1)
            for number, layer in zip(self.own, self._at_work, strict=True):
                y = self._dropped(layer.forward(y, block), number, block)
            if peers.rank < self._last:
                peers.send(y, peers.rank + 1)
                continue
            outputs.append(y)
            for other in self._others:
                peers.send(y, other)
        if peers.rank < self._last:
            outputs = [peers.receive(self._last) for _ in self.blocks]
        finals = zip(*(layer.finals() for layer in self._at_work), strict=True)
        return torch.cat(outputs), [self._gathered(list(final)) for final in finals]

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────

    def backward(self, dy: Tensor, finals: Sequence[Tensor], *, input_wanted: bool) -> Tensor | None:
        """Returns, on the first device, the gradient of all rows of the input, if it is wanted. It is sent to the
        others, who take it when they have done everything else (`of_input`)."""
        for number, layer in zip(self.own, self._at_work, strict=True):
            layer.begin_backward([final[number] for final in finals])
        peers, found = self.peers, []
        for block in reversed(self.blocks):
            d = dy[self.steps.rows(block)] if peers.rank == self._last else peers.receive(peers.rank + 1)
            for number, layer in reversed(list(zip(self.own, self._at_work, strict=True))):
                wanted = input_wanted or number > 0
                of_x = layer.backward(self._dropped(d, number, block), block, wanted=wanted)
                if of_x is not None:
                    d = of_x
            if peers.rank:
                peers.send(d, peers.rank - 1)
            elif input_wanted:
                found.append(d)
                for other in self._others:
                    peers.send(d, other)
        return torch.cat(found[::-1]) if found else None

    def of_weights(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of this device's weights, of those that are wanted."""
        by_layer = zip(self._at_work, _by_layer(wanted, len(self.own)), strict=True)
        return [found for layer, wants in by_layer for found in layer.of_weights(wants)]

    def of_input(self) -> Tensor:
        """Returns the gradient of the input, on devices other than the first."""
        return torch.cat([self.peers.receive(0) for _ in self.blocks][::-1])

    def of_states(self) -> list[Tensor]:
        """Returns the gradients of the states before the first step, of all layers."""
        firsts = zip(*(layer.of_first_states() for layer in self._at_work), strict=True)
        return [self._gathered(list(first)) for first in firsts]

    def _gathered(self, of_layers: list[Tensor]) -> Tensor:
        return self.peers.everyone.all_gather(torch.stack(of_layers), 0)

    def _dropped(self, y: Tensor, layer: int, block: range) -> Tensor:
        mask = self.masks[layer]
        return y if mask is None else y * mask[self.steps.rows(block)]


class _Waved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wave: Wave, bias: bool, count: int, anchor: Tensor, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """`tensors`: the first `count` are states, the others the weights of this device's layers."""
        ctx.wave, ctx.count = wave, count
        ctx.save_for_backward(x, *tensors)
        states, weights = tensors[:count], _by_layer(tensors[count:], len(wave.own))
        output, finals = wave.forward(x, states, [Weights.of(layer, bias) for layer in weights])
        return output, *finals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *finals: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018 - raises if one of them was changed since
        wave: Wave = ctx.wave
        *_, input_wanted = ctx.needs_input_grad[:5]
        wanted = ctx.needs_input_grad[5:]
        dx = wave.backward(dy, finals, input_wanted=input_wanted)
        of_weights = wave.of_weights(wanted[ctx.count :])
        if input_wanted and dx is None:
            dx = wave.of_input()
        of_states = wave.of_states() if any(wanted[: ctx.count]) else [None] * ctx.count
        return None, None, None, None, dx, *of_states, *of_weights


def waved(
    wave: Wave, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], bias: bool
) -> tuple[Tensor, list[Tensor]]:
    """Returns the output and final states of all layers, on every device, from rows of the input and first states.

    `weights`: of this device's layers, one layer after another."""
    # There is a backward on all devices or on none: also on one whose own weights are not trained.
    anchor = x.new_empty(0).requires_grad_(wave.keep)
    output, *finals = _Waved.apply(wave, bias, len(states), anchor, x, *states, *weights)  # type: ignore[no-untyped-call]
    return output, finals


def _by_layer(values: Sequence[Any], layers: int) -> list[Any]:
    """Returns the values in as many groups as there are layers."""
    each = len(values) // layers
    return [values[at : at + each] for at in range(0, len(values), each)]
