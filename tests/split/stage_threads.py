"""A pipeline whose devices are threads of one process, with real mailboxes between them, for tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES, Peers
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import Weight
from paceline.memory.arena import Arena
from paceline.split.cut import SAME, WHOLE
from paceline.split.stages import StagesCut
from paceline.split.values import Stages

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass
class Device:
    """What one of them has come to."""

    model: nn.Module
    cut: StagesCut
    losses: list[float]
    weight: float = 1.0  # by which its gradients are to be multiplied
    output: Any = None
    error: BaseException | None = None


def value_of(loss: torch.Tensor) -> float:
    return float(loss.detach())


def pipeline(
    split: Stages, make: Callable[[], nn.Module], loss: Loss, batches: Sequence[Any], last: Any = None
) -> list[Device]:
    """Every device trains on the batches, without updates, so that gradients add up; then all call their model in eval
    mode as `last(model)` does. The first error of any of them is raised here."""
    board = Board.create(split.stages, supervised=False)
    descriptor = os.memfd_create("test-peers")
    os.ftruncate(descriptor, split.stages**2 * BOX_BYTES)
    arena = Arena.of(descriptor)
    ends = threading.Event()
    devices = []
    for rank in range(split.stages):
        peers = _Ending(arena, Board(board.descriptor), rank, rank, split.stages, 60.0)
        peers.ends = ends
        devices.append(Device(make(), StagesCut(split, peers), []))
    threads = [threading.Thread(target=_work, args=(device, loss, batches, last, ends)) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arena.close()
    os.close(board.descriptor)
    errors = [device.error for device in devices if device.error is not None]
    for error in errors:
        if not isinstance(error, _OtherFailed):
            raise error
    return devices


class _OtherFailed(Exception):
    pass


class _Ending(Peers):
    """As with processes: who waits for a device that has failed fails too."""

    ends: threading.Event

    def _wait(self, other: int, ready: Any) -> None:
        def look() -> bool:
            if ready():
                return True
            if self.ends.is_set():
                raise _OtherFailed
            return False

        super()._wait(other, look)


def _work(device: Device, loss: Loss, batches: Sequence[Any], last: Any, ends: threading.Event) -> None:
    try:
        model, cut = device.model, device.cut
        cut.prepare(loss, model, batches[0])
        cut.take(dict(model.named_parameters()) | dict(model.named_buffers()))
        for batch in batches:
            model.train()
            part = cut.train(loss, model, batch, Weight.whole(), lambda found: read_loss(found, ""))
            device.losses.append(part.loss.mean if part.loss is not None else 0.0)
            device.weight = part.weight(part.loss.count) if part.loss is not None else 0.0
        if last is not None:
            model.eval()
            with torch.no_grad():
                device.output = cut.call(lambda called, _: last(called), model, ())
    except BaseException as error:
        device.error = error
        ends.set()


def summed_gradients(devices: Sequence[Device]) -> dict[str, torch.Tensor | None]:
    """What the owners would make of what all devices have found."""
    found: dict[str, torch.Tensor | None] = {}
    for name, _ in devices[0].model.named_parameters():
        parts = []
        for device in devices:
            gradient = device.model.get_parameter(name).grad
            if gradient is not None and device.cut.part_of(name) == WHOLE:
                parts.append(gradient)
        found[name] = torch.stack(parts).sum(0) if parts else None
    return found


def whole_buffers(devices: Sequence[Device]) -> dict[str, torch.Tensor]:
    """Each from the one device that has it."""
    found: dict[str, torch.Tensor] = {}
    for name, _ in devices[0].model.named_buffers():
        (holder,) = (device for device in devices if device.cut.part_of(name) != SAME)
        found[name] = holder.model.get_buffer(name)
    return found
