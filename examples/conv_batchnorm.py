"""A convolutional network with everything a real training script has: BatchNorm, a learning-rate schedule, clipping,
an evaluation and a checkpoint after every epoch.

python examples/conv_batchnorm.py                                      # one process
paceline run examples/conv_batchnorm.py --replicas 2                   # two replicas, the same result
paceline run examples/conv_batchnorm.py --replicas 2 -- --save net.safetensors

With --save the script goes on from the checkpoint if there is one, with any number of replicas. Kill it, and start it
again: the epochs that are done are passed over, and their results are printed from the record.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl

Batch = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Batch, Batch]:
    """sklearn's 1797 handwritten digits as images of 8×8: for training, and for the test."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = mixed[:1500], mixed[1500:]
    return (x[train], y[train]), (x[test], y[test])


def network() -> nn.Module:
    # No bias in front of a BatchNorm, which would subtract it again.
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def scores(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    x, y = batch
    output = model(x)
    return {"loss": F.cross_entropy(output, y), "accuracy": (output.argmax(1) == y).float().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=100, help="samples an update, over all replicas together")
    parser.add_argument("--save", metavar="PATH", help="a checkpoint to write, and to go on from if it is there")
    options = parser.parse_args()

    torch.manual_seed(0)  # every replica must build the same model
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    train_set, test_set = digits()
    updates = options.epochs * -(-len(train_set[0]) // options.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)

    trainer = pl.Trainer(model, optimizer, loss, scheduler=schedule, clip_norm=1.0)
    if options.save:
        trainer.resume(options.save)
    for epoch in range(options.epochs):
        for batch in trainer.batches(train_set, options.batch_size, seed=0):
            trainer.step(batch)
        found = trainer.evaluate(test_set, scores)
        if trainer.chief:
            print(f"epoch {epoch}: test loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}")
        if options.save:
            trainer.save(options.save)
    if trainer.chief:
        print(trainer.ledger.check())


if __name__ == "__main__":
    main()
