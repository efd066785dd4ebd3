"""What a script leaves in `.grad` belongs to no step, however the script is started."""

from __future__ import annotations

import pytest

from tests.conftest import Start

# The generator's loss goes through the discriminator, whose parameters get gradients that nobody has asked for.
GAN = """
import json
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()
unsure = nn.functional.softplus

def critics_loss(critic, batch):
    real, noise = batch
    return (unsure(-critic(real)) + unsure(critic(generator(noise).detach()))).mean()

def generators_loss(generator, batch):
    return unsure(-critic(generator(batch[1]))).mean()

of_critic = pl.Trainer(critic, torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9), critics_loss)
of_generator = pl.Trainer(generator, torch.optim.Adam(generator.parameters(), lr=0.01), generators_loss)
data = (torch.randn(32, 3).double() + 1, torch.randn(32, 4).double())
losses = []
for one, other in zip(of_critic.batches(data, 8, epochs=2), of_generator.batches(data, 8, epochs=2)):
    losses += [of_critic.step(one), of_generator.step(other)]
    unsure(critic(data[0])).sum().backward()  # looks at a gradient, and leaves it there
print(json.dumps({"losses": losses}))
"""


def test_two_trainers_of_a_gan_learn_as_in_one_process(start: Start) -> None:
    plain = start(GAN, None)
    runs = {flags: start(GAN, flags) for flags in ("--replicas 1", "--replicas 2", "--replicas 2 --servers 1")}
    expected = plain.fine().told("losses")
    assert len(expected) == 16
    for flags, run in runs.items():
        assert run.fine().told("losses") == pytest.approx(expected, rel=1e-12), flags
