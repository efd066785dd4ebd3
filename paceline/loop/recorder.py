"""Writes down what a run's first steps and its answers are, tensor by tensor, for `paceline verify`; then ends it.

    step-0000.safetensors               loss, gradients, optimizer state, parameters and buffers of the first step
    step-0001-answer-0000.safetensors   what `evaluate` or a predictor gave after it, in the order of the calls
    step-0001.safetensors
    …

A run that has asked its model nothing by itself is asked at the end: for the loss of the last batch, in eval mode and
without gradients. All processes do that together, as they evaluate.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim import Optimizer

from paceline.data.batch_values import leaves_in
from paceline.loop.engine import Engine
from paceline.loop.run_state import flatten
from paceline.run_place import Place, Recording
from paceline.verify.precision import AsItIs, largest_gain
from paceline.verify.recorded import NOT_ASKED, answer_file, asked_file, step_file

Ask = Callable[[], float]


class NoRecorder:
    """Of a run that nobody compares."""

    def step_closed(self, loss: float, ask: Ask) -> None:
        """The step is complete; `ask` computes the loss of its batch in eval mode."""

    def evaluated(self, value: Any) -> None:
        """The script was given this by `evaluate`."""

    def predicted(self, answer: Any) -> None:
        """The script was given this by a predictor."""


class Recorder(NoRecorder):
    """One file a step and one an answer, written by the one in charge while nobody can change what it reads."""

    def __init__(
        self, recording: Recording, engine: Engine, precision: AsItIs, optimizer: Optimizer, *, is_reference: bool
    ) -> None:
        self._recording, self._engine, self._precision, self._optimizer = recording, engine, precision, optimizer
        self._folder = Path(recording.folder)
        self._is_reference = is_reference
        self._gradients: dict[str, torch.Tensor] = {}
        self._steps = self._answers = 0
        self._ask: Ask | None = None  # of the last step, until it was asked
        engine.gradients_ready = self._gradients_ready
        if recording.asks and is_reference:
            atexit.register(self._end)  # a script may make fewer steps than are wanted

    def _gradients_ready(self) -> None:
        self._gradients = self._engine.gradients()

    def step_closed(self, loss: float, ask: Ask) -> None:
        """Records the step. After the last one, the script ends here."""
        if self._engine.in_charge:
            tensors = {"loss": torch.tensor(loss, dtype=torch.float64)}
            tensors |= {f"gradient/{name}": value for name, value in self._gradients.items()}
            tensors |= {f"model/{name}": value for name, value in self._engine.model_state().items()}
            tensors |= flatten(self._engine.optimizer_state())[0]
            self._write(step_file(self._steps), tensors)
        self._steps += 1
        self._ask = ask
        if self._steps >= self._recording.steps:
            self._end()
            raise SystemExit(0)

    def evaluated(self, value: Any) -> None:
        self._answered("evaluation", value if isinstance(value, dict) else {"": value})

    def predicted(self, answer: Any) -> None:
        self._answered("prediction", dict(enumerate(leaves_in(answer))))

    def _answered(self, kind: str, values: Mapping[Any, Any]) -> None:
        if self._engine.in_charge:
            numbers = {key: value for key, value in values.items() if isinstance(value, (torch.Tensor, int, float))}
            named = {f"{kind}/{key}" if key != "" else kind: _as_tensor(value) for key, value in numbers.items()}
            self._write(answer_file(self._steps, self._answers), named)
        self._answers += 1

    def _end(self) -> None:
        """Asks what the script has not."""
        ask, self._ask = self._ask, None
        if ask is None or not self._recording.asks or (self._is_reference and self._answers):
            return
        try:
            loss = ask()
        except Exception as error:
            if not self._is_reference:
                raise
            # A model may have no loss in eval mode. Then no other run is asked for it.
            sentence = str(error).partition("\n")[0]
            (self._folder / NOT_ASKED).write_text(f"{type(error).__name__}: {sentence}")
        else:
            if self._engine.in_charge:
                self._write(asked_file(self._steps), {"evaluation/loss in eval mode": _as_tensor(loss)})

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        whole = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
        notes = {"narrow": self._precision.narrow, "gain": str(largest_gain(self._optimizer.param_groups))}
        save_file(whole, self._folder / name, notes)
        self._precision.narrow = ""


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def open_recorder(place: Place, engine: Engine, precision: AsItIs, optimizer: Optimizer) -> NoRecorder:
    """If this run is to be recorded."""
    if place.recording is None:
        return NoRecorder()
    return Recorder(place.recording, engine, precision, optimizer, is_reference=place.started_by == "reference")
