"""Train a small network on sklearn's handwritten digits.

python examples/digits.py                           # one process
paceline run examples/digits.py --replicas 2        # two replicas, the same result
paceline compare examples/digits.py --until "accuracy>=0.97" --strategies "async, sync, mirrored, layout hidden, one"
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.get_default_dtype()) / 16, torch.tensor(labels)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = mixed[:1500], mixed[1500:]
    return (x[train], y[train]), (x[test], y[test])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the order of samples")
    parser.add_argument("--save", help="write a checkpoint here, and go on from it if it is there")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    width = options.width
    model = nn.Sequential(nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set, test_set = digits()

    trainer = pl.Trainer(model, optimizer, loss)
    if options.save:
        trainer.resume(options.save)
    found = 0.0
    for _ in range(options.epochs):
        for batch in trainer.batches(train_set, options.batch_size, seed=options.seed):
            trainer.step(batch)
        found = trainer.evaluate(test_set, accuracy, name="accuracy")
    if options.save:
        trainer.save(options.save)
    print(f"accuracy {found:.4f} after {trainer.steps} updates")


if __name__ == "__main__":
    main()
