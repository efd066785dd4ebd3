"""An ordinary PyTorch loop, and the two lines that make it one of several replicas.

python examples/existing_loop.py                           # one process, as always
paceline run examples/existing_loop.py --replicas 2        # mirrored replicas
torchrun --nproc-per-node 2 examples/existing_loop.py      # the same, started by torchrun

The lines are marked (1) and (2). As with DistributedDataParallel the data stays the loop's own business, so each
replica takes its part of every batch; here a DistributedSampler does that. `pl.Trainer` would also divide the samples,
survive a kill with the same result, and resume: see digits.py.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline as pl

TRAINED_ON = 1536  # samples; the rest is for the test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="samples an update, over all replicas together")
    options = parser.parse_args()

    torch.manual_seed(0)  # every replica must build the same model, and mix the samples alike
    images, labels = load_digits(return_X_y=True)
    mixed = torch.randperm(len(images))
    x, y = torch.tensor(images, dtype=torch.float32)[mixed] / 16, torch.tensor(labels)[mixed]
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    place = pl.place()  # (1) which replica this is: place.rank of place.world
    model, optimizer = pl.distribute(model, optimizer)  # (2)

    train_set = TensorDataset(x[:TRAINED_ON], y[:TRAINED_ON])
    sampler = DistributedSampler(train_set, num_replicas=place.world, rank=place.rank, seed=0)
    loader = DataLoader(train_set, batch_size=options.batch_size // place.world, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch_x), batch_y).backward()  # leaves the mean over all replicas in every p.grad
            optimizer.step()

    if place.rank == 0:
        with torch.no_grad():
            right = (model(x[TRAINED_ON:]).argmax(1) == y[TRAINED_ON:]).float().mean().item()
        print(f"accuracy {right:.4f} after {options.epochs} epochs")


if __name__ == "__main__":
    main()
