"""Recurrent models written by hand, as people write them: cells in a loop over time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH = 11, 6


class Stack(nn.Module):
    """Cells of torch, one above the other, with dropout between them and a tied embedding."""

    def __init__(self, kind: type[nn.RNNCellBase], layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList([kind(WIDTH, WIDTH) for _ in range(layers)])  # type: ignore[call-arg]
        self.drop = nn.Dropout(0.3)
        self.project = nn.Linear(WIDTH, WORDS)
        self.project.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedded = self.drop(self.words(words))
        zeros = embedded.new_zeros(len(words), WIDTH)
        states: list[Any] = [(zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros for cell in self.cells]
        tops = []
        for step in range(words.size(1)):
            x = embedded[:, step]
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = self.drop(states[number][0] if isinstance(cell, nn.LSTMCell) else states[number])
            tops.append(x)
        return self.project(torch.stack(tops, 1))


class NormedCell(nn.Module):
    """A GRU of plain linear layers, with a LayerNorm on its gates, and weights that are parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Linear(WIDTH, 2 * WIDTH)
        self.of_state = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.candidate = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        reset, update = self.norm(self.of_input(x) + self.of_state(h)).sigmoid().chunk(2, 1)
        new = torch.tanh(torch.cat([x, reset * h], 1) @ self.candidate)
        return torch.lerp(h, new, update)


class Handmade(nn.Module):
    """Cells of linear layers and learned first states. The outputs are written into a tensor that was there before, and
    layers are gone through one after another, each through all of time."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList([NormedCell() for _ in range(layers)])
        self.firsts = nn.Parameter(torch.randn(layers, WIDTH))
        self.project = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WORDS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inputs = list(self.words(words).unbind(1))
        for first, cell in zip(self.firsts, self.cells, strict=True):
            h = first.expand(len(words), -1)
            for step, x in enumerate(inputs):
                h = cell(x, h)
                inputs[step] = F.dropout(h, 0.2, self.training) + x
        found = inputs[0].new_zeros(len(words), words.size(1), WORDS)
        for step, x in enumerate(inputs):
            found[:, step] = self.project(x)
        return found


class Attending(nn.Module):
    """An encoder in both directions and a decoder that attends to all of it, with or without feeding what it saw into
    its next input (which makes one layer of the decoder's two)."""

    def __init__(self, feeding: bool) -> None:
        super().__init__()
        self.feeding = feeding
        self.words = nn.Embedding(WORDS, WIDTH)
        self.ahead, self.back = nn.GRUCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.low = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.high = nn.LSTMCell(WIDTH, WIDTH)
        self.keys = nn.Linear(2 * WIDTH, WIDTH)
        self.mix = nn.Linear(3 * WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WORDS)
        self.drop = nn.Dropout(0.25)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        embedded = self.words(words)
        zeros = embedded.new_zeros(len(words), WIDTH)
        h = zeros
        there, back = [], []
        for x in embedded.unbind(1):
            there.append(h := self.ahead(x, h))
        last, h = h, zeros
        for x in reversed(embedded.unbind(1)):
            back.append(h := self.back(x, h))
        encoded = torch.cat([torch.stack(there, 1), torch.stack(back[::-1], 1)], 2)
        keys = self.keys(encoded)
        low, high, seen, chosen = (last, zeros), (h, zeros), zeros, []
        for step in range(words.size(1)):
            low = self.low(torch.cat([embedded[:, step], seen if self.feeding else last], 1), low)
            high = self.high(self.drop(low[0]), high)
            scores = torch.bmm(keys, high[0].unsqueeze(2)).squeeze(2).softmax(1)
            context = torch.bmm(scores.unsqueeze(1), encoded).squeeze(1)
            seen = torch.tanh(self.mix(torch.cat([context, high[0]], 1)))
            chosen.append(self.project(self.drop(seen)))
        return torch.stack(chosen, 1)


class Normed(nn.Module):
    """Cells with a BatchNorm between them: each step changes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.low, self.high = nn.RNNCell(WIDTH, WIDTH), nn.RNNCell(WIDTH, WIDTH, nonlinearity="relu")
        self.norm = nn.BatchNorm1d(WIDTH)
        self.project = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found, low, high = [], None, None
        for x in self.words(words).unbind(1):
            low = self.low(x, low)
            high = self.high(self.norm(low), high)
            found.append(self.project(high))
        return torch.stack(found, 1)


MODELS = {
    "LSTM cells": lambda: Stack(nn.LSTMCell, 3),
    "GRU cells": lambda: Stack(nn.GRUCell, 4),
    "handmade": Handmade,
    "attending": lambda: Attending(feeding=False),
    "fed back": lambda: Attending(feeding=True),
    "normed": Normed,
}


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Of the next word, and of the size of some weights."""
    found = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    return found + 1e-3 * sum(weight.square().sum() for weight in model.parameters() if weight.dim() == 2)
