"""Writes down losses, gradients, parameters, buffers and optimizer state of a run's first steps, then ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from paceline.loop.engine import StateByName
from paceline.loop.training_state import flatten
from paceline.run_place import Recording


class Recorded(Protocol):
    """What an engine must tell to be recorded."""

    gradients_ready: Callable[[], None] | None

    @property
    def chief(self) -> bool: ...

    def gradients(self) -> dict[str, torch.Tensor]: ...

    def model_state(self) -> dict[str, torch.Tensor]: ...

    def optimizer_state(self) -> StateByName: ...


class Recorder:
    """One file a step, written by the chief while nobody can change what it reads."""

    def __init__(self, recording: Recording, engine: Recorded, model: nn.Module) -> None:
        self._recording = recording
        self._engine = engine
        self._model = model
        self._gradients: dict[str, torch.Tensor] = {}
        self._steps = 0
        engine.gradients_ready = self._gradients_ready

    def _gradients_ready(self) -> None:
        self._gradients = self._engine.gradients()

    def step_closed(self, loss: float) -> None:
        """The step is complete: record it. After the last one, the script ends here."""
        if self._engine.chief:
            tensors = {"loss": torch.tensor(loss, dtype=torch.float64)}
            tensors |= {f"gradient/{name}": value for name, value in self._gradients.items()}
            tensors |= {f"model/{name}": value for name, value in self._engine.model_state().items()}
            tensors |= flatten(self._engine.optimizer_state())[0]
            whole = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
            save_file(whole, Path(self._recording.folder) / f"step-{self._steps:04d}.safetensors")
        self._steps += 1
        if self._steps >= self._recording.steps:
            raise SystemExit(0)


def open_recorder(recording: Recording | None, engine: Recorded, model: nn.Module) -> Recorder | None:
    """If this run is to be recorded."""
    return Recorder(recording, engine, model) if recording is not None else None
