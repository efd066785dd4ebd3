"""Architectures written here in plain torch, as their papers describe them."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from case import Case, adamw, momentum, numbers, whole_numbers
from torch import nn

CLASSES, WORDS = 5, 60


def _classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


# ── U-Net: Ronneberger, Fischer, Brox 2015 ───────────────────────────────────────────────────────────────────


def _twice(inner: int, outer: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inner, outer):
        layers += [nn.Conv2d(channels, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(_twice(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for number in reversed(range(len(self.up))):
            x = self.join[number](torch.cat([kept[number], self.up[number](x)], 1))
        return self.last(x)  # type: ignore[no-any-return]


def unet() -> Case:
    model = UNet()
    return Case(model, momentum(model), _classes, (numbers(3, 32, 32), whole_numbers(CLASSES, 32, 32)))


# ── a translator: Sutskever, Vinyals, Le 2014, with the attention of Luong, Pham, Manning 2015 ───────────────


class Translator(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.general = nn.Linear(width, width, bias=False)
        self.joined = nn.Linear(2 * width, width)
        self.words = nn.Linear(width, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        read, state = self.encoder(self.source(source))
        written, _ = self.decoder(self.target(target), state)
        weights = (self.general(written) @ read.transpose(1, 2)).softmax(-1)
        attended = torch.tanh(self.joined(torch.cat([weights @ read, written], -1)))
        return self.words(attended)  # type: ignore[no-any-return]


def lstm_translator() -> Case:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        source, target = batch
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    model = Translator()
    return Case(model, adamw(model), loss, (whole_numbers(WORDS, 16), whole_numbers(WORDS, 13, seed=9)))


# ── DLRM: Naumov and others 2019 ─────────────────────────────────────────────────────────────────────────────


class DLRM(nn.Module):
    def __init__(self, rows: tuple[int, ...] = (100, 60, 30), width: int = 8, dense: int = 6) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows)
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(len(rows) + 1, len(rows) + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, *looked_up: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        all_of_it = torch.stack([x, *(table(rows) for table, rows in zip(self.tables, looked_up, strict=True))], 1)
        products = all_of_it @ all_of_it.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)  # type: ignore[no-any-return, index]


def dlrm() -> Case:
    """Tables with sparse gradients, and the plain SGD that goes with them."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        clicked, *given = batch
        return F.binary_cross_entropy_with_logits(model(*given), clicked.to(given[0].dtype))

    model = DLRM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looked_up = (whole_numbers(rows, 4, seed=rows) for rows in (100, 60, 30))
    return Case(model, optimizer, loss, (whole_numbers(2), numbers(6), *looked_up))


# ── a graph network: message passing of Gilmer and others 2017, updates as in GIN (Xu and others 2019) ───────


class GraphNetwork(nn.Module):
    """A batch of graphs is one graph of several parts, as in the libraries for it."""

    def __init__(self, features: int = 6, width: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        graphs, count = nodes.shape[:2]
        begin, end = (edges + count * torch.arange(graphs)[:, None, None]).flatten(0, 1).unbind(1)
        x = self.first(nodes).flatten(0, 1)
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = message(torch.cat([x[begin], x[end]], 1)).relu()
            x = norm(x + self.dropout(update(torch.zeros_like(x).index_add(0, end, sent))))
        return self.last(x.unflatten(0, (graphs, count)).mean(1))  # type: ignore[no-any-return]


def graph_network() -> Case:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        nodes, edges, kind = batch
        return F.cross_entropy(model(nodes, edges), kind)

    model = GraphNetwork()
    return Case(model, adamw(model), loss, (numbers(9, 6), whole_numbers(9, 20, 2), whole_numbers(CLASSES, seed=9)))


# ── not published ────────────────────────────────────────────────────────────────────────────────────────────


def perceptron() -> Case:
    """For the test of the zoo itself."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))
    return Case(model, adamw(model), _classes, (numbers(6), whole_numbers(CLASSES)))
