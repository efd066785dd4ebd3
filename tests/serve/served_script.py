"""A model that a test can hold, fail and kill: it answers `weight * x`, and does what a row's first number asks."""

import os
import signal
import time

import torch

import paceline as pl

FAIL, DIE, HOLD = 666.0, 777.0, 555.0


class Obedient(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        asked = set(x[:, 0].tolist())
        if FAIL in asked:
            raise ValueError("no 666 here")
        if DIE in asked:
            os.kill(os.getpid(), signal.SIGKILL)
        while HOLD in asked and os.path.exists(os.environ["HOLD_FILE"]):
            time.sleep(0.002)
        return {"scaled": self.weight * x, "total": (self.weight * x).sum(1)}


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)["scaled"].mean()


if __name__ == "__main__":
    model = Obedient()
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for batch in trainer.batches(torch.arange(32.0).view(8, 4), batch_size=4):
        trainer.step(batch)
    raise SystemExit("it was trained")
