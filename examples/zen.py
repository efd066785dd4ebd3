"""A small transformer learns the Zen of Python by heart, letter by letter; one model, cut over devices in any way.

python examples/zen.py                                                           # one process
paceline dims examples/zen.py                                                    # which dimensions there are to cut
paceline run examples/zen.py --mesh model=2 --layout heads=model,hidden=model    # every block over two devices
paceline run examples/zen.py --stages 2                                          # two blocks each, as a pipeline
paceline run examples/zen.py --mesh data=2,model=2 --layout batch=data,hidden=model

All of them learn the same and save the same file. Afterwards:

python examples/zen.py --say "Although practicality" --cut    # with the saved model, cut over two devices
"""

import argparse
import codecs
import contextlib
import io

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

WINDOW, WIDTH, HEADS = 32, 64, 4

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this

TEXT = codecs.decode(this.s, "rot13")
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.between(x))))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(torch.randn(WINDOW, WIDTH) / 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.next = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.next(self.norm(self.blocks(self.letters(letters) + self.places)))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(epochs: int) -> None:
    torch.manual_seed(0)
    model = Reader()
    trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss)
    windows = torch.tensor([LETTERS.index(letter) for letter in TEXT]).unfold(0, WINDOW + 1, 1)
    for batch in trainer.batches(windows, batch_size=64, epochs=epochs, seed=0):
        trainer.step(batch)
    print(f"loss {trainer.evaluate(windows, loss):.3f} after {trainer.steps} updates")
    trainer.save("zen.safetensors")


def say(beginning: str, cut: bool) -> str:
    split = pl.Layout(mesh={"model": 2}, layout={"heads": "model", "hidden": "model"}) if cut else None
    with pl.load("zen.safetensors", Reader(), split=split) as predict:
        while len(beginning) < 3 * WINDOW and not beginning.endswith("\n"):
            seen = beginning[-WINDOW:]
            scores = predict(torch.tensor([[LETTERS.index(letter) for letter in seen.ljust(WINDOW)]]))
            beginning += LETTERS[int(scores[0, len(seen) - 1].argmax())]
    return beginning.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--say", metavar="BEGINNING", help="go on with this, by the model in zen.safetensors")
    parser.add_argument("--cut", action="store_true", help="with the model cut over two devices")
    options = parser.parse_args()
    if options.say is not None:
        print(say(options.say, options.cut))
    else:
        train(options.epochs)


if __name__ == "__main__":
    main()
