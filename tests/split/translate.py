"""A small encoder and decoder, trained, evaluated and saved; what it found is printed."""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

WORDS, WIDTH = 11, 12


class Translator(nn.Module):
    """The decoder begins where the encoder ended, and a projection on top chooses words."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.encoder = nn.LSTM(8, WIDTH, num_layers=3, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(8, WIDTH, num_layers=3, batch_first=True, dropout=dropout)
        self.attend = nn.GRU(WIDTH, WIDTH, batch_first=True)  # of one layer: it is not cut
        self.drop = nn.Dropout(dropout)
        self.project = nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.words(source))
        decoded, _ = self.decoder(self.words(target), state)
        return self.project(self.drop(self.attend(decoded)[0]))


class TranslatorOfCells(nn.Module):
    """The same idea in loops over time: every layer of the decoder begins where that of the encoder ended, and attends
    to what the encoder has left."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.LSTMCell(WIDTH, WIDTH) for _ in range(2)])
        self.drop = nn.Dropout(dropout)
        self.project = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        zeros = self.words.weight.new_zeros(len(source), WIDTH)
        states = [(zeros, zeros)] * 2
        left = torch.stack([self.climb(self.encoder, x, states) for x in self.words(source).unbind(1)], 1)
        found = []
        for x in self.words(target).unbind(1):
            top = self.climb(self.decoder, x, states)
            weights = torch.bmm(left, top.unsqueeze(2)).softmax(1)
            found.append(self.project(torch.cat([top, (left * weights).sum(1)], 1)))
        return torch.stack(found, 1)

    def climb(self, cells: nn.ModuleList, x: torch.Tensor, states: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        for number, cell in enumerate(cells):
            states[number] = cell(x, states[number])
            x = self.drop(states[number][0])
        return x


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    source, target = batch
    found = model(source, target[:, :-1])
    penalty = sum(weight.square().sum() for name, weight in model.named_parameters() if name.startswith("decoder"))
    return F.cross_entropy(found.flatten(0, 1), target[:, 1:].flatten()) + 1e-4 * penalty


def right(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    source, target = batch
    return -F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten()).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cells", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = (TranslatorOfCells if options.cells else Translator)(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = pl.Trainer(model, optimizer, loss, clip_norm=1.0)
    if options.resume:
        assert trainer.resume("translator.safetensors")
    generator = torch.Generator().manual_seed(1)
    data = tuple(torch.randint(WORDS, (36, length), generator=generator) for length in (9, 7))
    losses = []
    for number in range(2):
        for batch in trainer.batches(data, batch_size=12, epochs=1, seed=5):
            losses.append(trainer.step(batch))
        if number == 0 and not options.resume:
            trainer.save("translator.safetensors")
    print(json.dumps({"losses": losses, "right": trainer.evaluate(data, right, batch_size=10)}))
    trainer.save("end.safetensors")
    trainer.close()


if __name__ == "__main__":
    main()
