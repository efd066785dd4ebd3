"""Try hyperparameters on sklearn's handwritten digits, several at a time, and keep the best three networks.

python examples/trials.py --lr 0.01                     # one process, one choice
paceline tune examples/trials.py --param lr=log:1e-4..1e-1 --param width=32,64,128,256 --param dropout=0..0.5 \\
    --trials 16 --parallel 2 --maximize accuracy        # sixteen, two at a time
… --prune asha                                          # those that begin badly are ended early
… --folds 5                                             # cross-validated: every trial five times, on other samples
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    trial = pl.trial()
    images, labels = load_digits(return_X_y=True)
    digits = (torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, validation_set = trial.fold(digits)

    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(width, 10))
    trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=options.lr), loss)
    checkpoint = trial.folder / "trials.safetensors"
    if trial.number is not None:
        trainer.resume(checkpoint)  # a trial that was killed goes on
    found = 0.0
    for _ in range(options.epochs):
        for batch in trainer.batches(train_set, batch_size=64):
            trainer.step(batch)
        found = trainer.evaluate(validation_set, accuracy, name="accuracy")
        if trial.number is not None:
            trainer.save(checkpoint)
    print(f"accuracy {found:.4f} after {trainer.steps} updates")


if __name__ == "__main__":
    main()
