"""Writes down what a run's first steps and its answers are, tensor by tensor, for `paceline verify`; then ends it.

    step-0000.safetensors               loss and what it logs, gradients, optimizer state, model of the first step
    step-0001-answer-0000.safetensors   what `evaluate` or a predictor gave after it, in the order of the calls
    step-0001.safetensors
    …

After the last step a run is asked for the loss of its batch, in eval mode and without gradients; all processes do that
together, as they evaluate. And then for what the model answers to the call that the loss makes: a call of another kind,
which a cut model has to be right in too. A script that ends before that step, and has asked by itself, is not asked.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim import Optimizer

from paceline.data.batch_values import leaves_in
from paceline.loop.engine import Closed, Engine
from paceline.loop.run_state import flatten
from paceline.run_place import Place, Recording
from paceline.verify.gain import Gain
from paceline.verify.precision import AsItIs
from paceline.verify.recorded import CALLED, NOT_ASKED, answer_file, asked_file, step_file

AskLoss = Callable[[], float]
AskModel = Callable[[], Mapping[str, Any]]


class NoRecorder:
    """Of a run that nobody compares."""

    def step_closed(self, closed: Closed, ask_loss: AskLoss, ask_model: AskModel) -> None:
        """The step is complete. `ask_loss` computes the loss of its batch in eval mode, and `ask_model`, after that,
        what the model answers in several ways to the call that the loss makes."""

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
        self._ask: tuple[AskLoss, AskModel] | None = None  # of the last step, until it was asked
        engine.gradients_ready = self._gradients_ready
        if recording.asks and is_reference:
            atexit.register(self._end, early=True)  # a script may make fewer steps than are wanted

    def _gradients_ready(self) -> None:
        self._gradients = self._engine.gradients()

    def step_closed(self, closed: Closed, ask_loss: AskLoss, ask_model: AskModel) -> None:
        """Records the step. After the last one, the script ends here."""
        if self._engine.in_charge:
            tensors = {"loss": _as_tensor(closed.loss)}
            tensors |= {f"logged/{name}": _as_tensor(value) for name, value in closed.logged.items()}
            tensors |= {f"gradient/{name}": value for name, value in self._gradients.items()}
            tensors |= {f"model/{name}": value for name, value in self._engine.model_state().items()}
            tensors |= flatten(self._engine.optimizer_state())[0]
            self._write(step_file(self._steps), tensors)
        self._steps += 1
        self._ask = (ask_loss, ask_model)
        if self._steps >= self._recording.steps:
            self._end(early=False)
            raise SystemExit(0)

    def evaluated(self, value: Any) -> None:
        self._answered("evaluation", value if isinstance(value, dict) else {"": value})

    def predicted(self, answer: Any) -> None:
        self._answered("prediction", dict(enumerate(leaves_in(answer))))

    def _answered(self, kind: str, values: Mapping[Any, Any]) -> None:
        if self._engine.in_charge:
            self._write(answer_file(self._steps, self._answers), _named(kind, values))
        self._answers += 1

    def _end(self, *, early: bool) -> None:
        """Asks what the script has not. `early`: in one process whose script has ended before the last step."""
        asked, self._ask = self._ask, None
        if asked is None or not self._recording.asks or (early and self._answers):
            return
        ask_loss, ask_model = asked
        try:
            found = {"evaluation/loss in eval mode": _as_tensor(ask_loss())}
        except Exception as error:
            if not self._is_reference:
                raise
            # A model may have no loss in eval mode. Then no other run is asked for it.
            sentence = str(error).partition("\n")[0]
            (self._folder / NOT_ASKED).write_text(f"{type(error).__name__}: {sentence}")
            return
        if self._is_reference:
            # A loss need not call the model as such, nor in a way that can be repeated. Then no other run is asked.
            with contextlib.suppress(Exception):
                found |= _answers(ask_model())
        elif self._recording.calls:
            found |= _answers(ask_model())
        if self._engine.in_charge:
            self._write(asked_file(self._steps), found)

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        whole = {key: value.detach().cpu().clone().contiguous() for key, value in tensors.items()}
        notes = {"narrow": self._precision.narrow, "gain": Gain.of(self._optimizer.param_groups).note()}
        save_file(whole, self._folder / name, notes)
        self._precision.narrow = ""


def _named(kind: str, values: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Returns those values that are tensors or numbers, by names of this kind."""
    numbers = {key: value for key, value in values.items() if isinstance(value, (torch.Tensor, int, float))}
    return {f"{kind}/{key}" if key != "" else kind: _as_tensor(value) for key, value in numbers.items()}


def _answers(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of answers, by how they were given."""
    found: dict[str, torch.Tensor] = {}
    for how, answer in given.items():
        found |= _named(f"{CALLED}/{how}", dict(enumerate(leaves_in(answer))))
    return found


def _as_tensor(value: torch.Tensor | float) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def open_recorder(place: Place, engine: Engine, precision: AsItIs, optimizer: Optimizer) -> NoRecorder:
    """If this run is to be recorded."""
    if place.recording is None:
        return NoRecorder()
    return Recorder(place.recording, engine, precision, optimizer, is_reference=place.started_by == "reference")
