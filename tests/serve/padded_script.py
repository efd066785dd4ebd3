"""A model that takes rows of any length: it doubles each number, adds a row up, says how long the rows were, and gives
five classes, whatever the length."""

import os
import time

import torch

HOLD = 555


class Doubling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        while HOLD in ids[:, 0].tolist() and os.path.exists(os.environ["HOLD_FILE"]):
            time.sleep(0.002)
        length = torch.full((len(ids),), ids.shape[1])
        classes = ids.sum(1, keepdim=True) + torch.arange(5)
        return {"doubled": 2 * self.weight * ids, "total": ids.sum(1), "length": length, "classes": classes}


def make_model() -> torch.nn.Module:
    return Doubling()
