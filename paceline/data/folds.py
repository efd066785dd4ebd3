"""A dataset cut into folds: which samples a model is trained on, and which it is judged by.

    order of the seed   │ fold 0 │ fold 1 │ fold 2 │ fold 3 │ fold 4 │
    fold 1 validates      train    judged   train    train    train

The order is the ledger's, so it follows from (seed, length) alone: every process, and every trial, cuts alike. Each
sample is in the validation part of exactly one fold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from paceline.data.batch_values import map_tensors
from paceline.data.feed import TensorFeed, open_feed
from paceline.data.ledger import Ledger
from paceline.errors import DataError


def fold_indices(length: int, fold: int, folds: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The samples to train on and those to validate with, by index.

    >>> train, validation = fold_indices(7, fold=1, folds=3)
    >>> len(train), len(validation), sorted([*train.tolist(), *validation.tolist()])
    (5, 2, [0, 1, 2, 3, 4, 5, 6])
    """
    if not 2 <= folds <= length:
        raise DataError("folds", folds, f"give a number from 2 to the {length} samples of the dataset")
    if not 0 <= fold < folds:
        raise DataError("fold", fold, f"give a number from 0 to {folds - 1}")
    order = Ledger(length, length, seed=seed).indices(0, range(length))
    bounds = [length * number // folds for number in (fold, fold + 1)]
    return torch.cat((order[: bounds[0]], order[bounds[1] :])), order[bounds[0] : bounds[1]]


def split_by_fold(dataset: Any, fold: int, folds: int, seed: int = 0) -> tuple[Any, Any]:
    """The dataset without one of its folds, and that fold: tensors of tensors, else `Subset`s."""
    feed = open_feed(dataset) if not isinstance(dataset, IterableDataset) else None
    if feed is None or feed.length is None:
        raise DataError("dataset", type(dataset).__name__, "folds need one with len() and [index]")
    parts = fold_indices(feed.length, fold, folds, seed)
    if isinstance(feed, TensorFeed):
        tensors = getattr(dataset, "tensors", dataset)
        train, validation = (_rows(tensors, indices) for indices in parts)
    else:
        train, validation = (Subset(dataset, indices.tolist()) for indices in parts)
    return train, validation


def _rows(tensors: Any, indices: Tensor) -> Any:
    return map_tensors(lambda tensor: tensor[indices.to(tensor.device)], tensors)
