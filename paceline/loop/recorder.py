"""Writes down losses, gradients, parameters, buffers and optimizer state of a run's first steps, then ends it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.loop.engine import Engine
from paceline.loop.run_state import flatten
from paceline.run_place import Recording


class Recorder:
    """One file a step, written by the one in charge while nobody can change what it reads."""

    def __init__(self, recording: Recording, engine: Engine) -> None:
        self._recording = recording
        self._engine = engine
        self._gradients: dict[str, torch.Tensor] = {}
        self._steps = 0
        engine.gradients_ready = self._gradients_ready

    def _gradients_ready(self) -> None:
        self._gradients = self._engine.gradients()

    def step_closed(self, loss: float) -> None:
        """The step is complete: record it. After the last one, the script ends here."""
        if self._engine.in_charge:
            tensors = {"loss": torch.tensor(loss, dtype=torch.float64)}
            tensors |= {f"gradient/{name}": value for name, value in self._gradients.items()}
            tensors |= {f"model/{name}": value for name, value in self._engine.model_state().items()}
            tensors |= flatten(self._engine.optimizer_state())[0]
            whole = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
            save_file(whole, Path(self._recording.folder) / f"step-{self._steps:04d}.safetensors")
        self._steps += 1
        if self._steps >= self._recording.steps:
            raise SystemExit(0)


def open_recorder(recording: Recording | None, engine: Engine) -> Recorder | None:
    """If this run is to be recorded."""
    return Recorder(recording, engine) if recording is not None else None
