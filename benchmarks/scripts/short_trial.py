"""A trial that does next to nothing: torch is loaded, one step made, one number told, one checkpoint saved."""

import torch
from torch import nn

import paceline as pl

trial = pl.trial(x=1)
model = nn.Linear(2, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).pow(2).mean())
for batch in trainer.batches(torch.ones(4, 2), 4):
    trainer.step(batch)
trainer.report(trial.x)
trainer.save(trial.folder / "model.safetensors")
