"""Members of an ensemble that a test can hold and kill, each by its own weight: they answer `weight * x`."""

import os
import signal
import time

import torch

import paceline as pl

DIE = 700.0  # and the member's weight


class Member(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.item()
        if x[0, 0].item() == DIE + weight:
            os.kill(os.getpid(), signal.SIGKILL)
        while os.path.exists(f"{os.environ['HOLD_FILE']}-{weight:g}"):
            time.sleep(0.002)
        return self.weight * x


if __name__ == "__main__":
    model = Member()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = pl.Trainer(model, optimizer, lambda model, batch: -model.weight.sum() + 0 * model(batch).sum())
    for batch in trainer.batches(torch.arange(32.0).view(8, 4), batch_size=4, epochs=10_000):
        trainer.step(batch)
