"""Whose batch statistics are added up in a pass: those of all replicas that have samples in it, or (local) of one.

Of a cut model a BatchNorm may see a part of each sample: then the devices of a replica join in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from paceline.errors import DataError
from paceline.exchange.members import Members
from paceline.exchange.sums import SharedSums
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.step_parts import StepPart
from paceline.optim.batchnorm import Statistics, has_batchnorm, make_exact
from paceline.torch_private import AnyBatchNorm


class BatchStatistics(StepPart):
    """The statistics of every BatchNorm of one replica."""

    def __init__(
        self, model: nn.Module, sums: SharedSums, hosts: OneHost, row: int, devices: int, *, exact: bool
    ) -> None:
        """`row`: of this process on the board; `devices`: that a replica is cut over."""
        self.exact = exact
        self.some_were_idle = False  # in this step a member had no samples in some pass
        self._model, self._sums, self._hosts = model, sums, hosts
        self._row, self._devices = row, devices
        self._has_batchnorm = has_batchnorm(model)
        self._of_part, self._of_all_devices = Statistics(), Statistics()
        self._undo = make_exact(model, self._of_part)
        self._ranks: tuple[int, ...] = ()

    def begin(self, members: Members, number: int) -> None:
        self._sums.begin(members)
        self._ranks = members.ranks
        self.some_were_idle = False

    def over_devices(self, is_over: Callable[[nn.Module], bool]) -> None:
        """These see a part of each sample: their statistics are sums over the devices too."""
        for module in self._model.modules():
            if isinstance(module, AnyBatchNorm) and is_over(module):
                module._statistics = self._of_all_devices  # type: ignore[assignment]

    @contextmanager
    def one_pass(self, among: Sequence[int], count: int) -> Iterator[None]:
        """Goes around a pass in which `among`, of `count` members, have samples."""
        among, count = self._hosts.here(among, count)
        self.some_were_idle |= len(among) < count
        if self.exact and len(among) > 1:
            self._of_part.sum = self._over(among)
        if self._devices > 1:
            self._of_all_devices.sum = self._over_devices(among)
        try:
            yield
        finally:
            self._of_part.sum = self._of_all_devices.sum = None

    def _over(self, among: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        part = self._row % self._devices  # of a cut model, from those that have the same part
        if not self._hosts.sums_gradients:
            ranks = [self._ranks[index * self._devices + part] for index in among]
            return lambda values: self._sums.sum(values, ranks)
        self._check_nobody_is_idle(among)
        here = self._ranks[part :: self._devices]
        return lambda values: self._hosts.sum(self._sums.sum(values, here))

    def _over_devices(self, among: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same of what all devices of a replica see a part of."""
        if self.exact and self._hosts.sums_gradients:
            self._check_nobody_is_idle(among)
            return lambda values: self._hosts.sum(self._sums.sum(values, self._ranks))
        replicas = among if self.exact else [self._row // self._devices]
        everybody = [replica * self._devices + device for replica in replicas for device in range(self._devices)]
        return lambda values: self._sums.sum(values, everybody)

    def _check_nobody_is_idle(self, among: Sequence[int]) -> None:
        everybody = self._hosts.total // self._devices
        if self._has_batchnorm and len(among) < everybody:
            raise DataError(
                "batch size",
                f"too small for {everybody} replicas in the last batch",
                "with BatchNorm on several hosts every replica needs samples in every batch; give drop_last=True",
            )

    def close(self) -> None:
        self._undo()
