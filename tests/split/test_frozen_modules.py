"""Modules that the user has frozen with `.eval()` in a model that trains stay frozen, however the model is cut."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from devices import on_devices
from torch import nn

from paceline.exchange.mailboxes import Peers
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import Weight
from paceline.split.cut import open_cut
from paceline.split.values import Layout, Split, Stages, Tiles

IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Dropping(nn.Module):
    """Decides by its own mode, in a forward that a trace follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3)
        self.dropping, self.norm = Dropping(), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.dropping(self.first(x))))


@pytest.mark.parametrize(
    "split",
    [
        Layout(mesh={"model": 2}, layout={"channels": "model"}),
        Stages(stages=2, cut_at=("norm",)),
        Tiles(rows=2),
    ],
    ids=lambda split: type(split).__name__,
)
def test_what_is_frozen_is_neither_trained_nor_put_into_train_mode(split: Split) -> None:
    torch.manual_seed(1)
    whole = Net()
    whole.norm.running_mean.normal_()
    whole.dropping.eval()
    whole.norm.eval()
    one_by_one = threading.Lock()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) ** 2).mean()  # type: ignore[no-any-return]

    def device(peers: Peers) -> tuple[list[bool], float | None]:
        cut = open_cut(split, peers, {})
        with one_by_one:
            model = copy.deepcopy(whole)
        cut.prepare(loss, model, IMAGES)
        named = (*model.named_parameters(), *model.named_buffers())
        cut.take({name: cut.part_of(name).of(tensor) for name, tensor in named})
        part = cut.train(loss, model, IMAGES, Weight.whole(), lambda found: read_loss(found, "")).loss
        return [module.training for module in model.modules()], part.mean if cut.speaks and part else None

    results = on_devices(2, device)
    assert all(modes == [module.training for module in whole.modules()] for modes, _ in results)
    (value,) = (value for _, value in results if value is not None)
    assert value == pytest.approx(float(loss(whole, IMAGES).detach()), rel=1e-5)
