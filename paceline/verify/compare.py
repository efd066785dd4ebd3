"""Finds the first tensor that differs between two recorded runs.

Float sums depend on their order, so equal runs differ by rounding. A tensor counts as equal when no element is off
by more than a tolerance times the tensor's largest magnitude (or, for a gradient that is small among gradients, a
tenth of the largest of them): a mistake in an algorithm is orders of magnitude above that, rounding orders below.

In float64 that is all, but for what an optimizer that normalizes makes of rounding: Adam divides by a gradient's own
size, or by 1e-8 if it has none, and so a parameter may be off by as much as the measured difference of its gradients
explains (`gain`). In float32 some gradients are nothing but rounding, e.g. of a bias in front of a BatchNorm,
which is zero in exact arithmetic. An optimizer that normalizes, like Adam, makes full steps of them, in a direction
that rounding decides. Elements whose gradients agree less well than the tolerance asks are therefore left out from
then on, and counted. The same holds in a run in float64 from where its script has computed in float32 by itself, but
only for what is not equal in float64 anyway.

Within a step the causes come before their effects: loss, what it logs, gradients, optimizer state, parameters, buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from paceline.errors import PacelineError
from paceline.verify.gain import SECOND_MOMENT, Gain
from paceline.verify.precision import NARROW, name_of, narrower
from paceline.verify.recorded import files_of, is_answer, step_of

KINDS = ("loss", "logged", "gradient", "optimizer", "model", "evaluation", "prediction")
ANSWERS = ("evaluation", "prediction")
DEFAULT_TOLERANCE = 1e-4  # in float32
# Of a gradient that was rounded to the 8 bits of bfloat16 by each replica, a sum is right to about 1/256.
TOLERANCES = {"float64": 1e-12, "float32": DEFAULT_TOLERANCE, "float16": 3e-3, "bfloat16": 2e-2}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """One tensor in which two runs differ."""

    step: int  # of an answer: the steps made before it
    tensor: str
    error: float  # largest difference of an element
    scale: float  # largest magnitude in the reference
    reason: str | None = None  # if they cannot be compared at all

    def __str__(self) -> str:
        when = f"step {self.step}"
        if self.tensor.partition("/")[0] in ANSWERS:
            when = f"after step {self.step - 1}" if self.step else "before the first step"
        if self.reason:
            return f"{when}: {self.tensor} {self.reason}"
        return f"{when}: {self.tensor} differs by {self.error:.3g} ({self.relative:.2g} of its scale)"

    @property
    def relative(self) -> float:
        if self.error == 0:
            return 0.0
        return self.error / self.scale if self.scale else float("inf")


@dataclass(frozen=True)
class Verdict:
    """What comparing two runs gave."""

    steps: int
    tensors: int
    answers: dict[str, int]  # how many evaluations and predictions were compared
    tolerance: float  # that was needed: the one asked for, or that of the type the script has narrowed to
    narrow: str  # that type, if it was needed; empty if all is as precise as was asked for
    left_out: int  # elements whose gradients were nothing but rounding
    largest: Difference | None  # the largest relative difference, equal or not
    first: Difference | None  # the first that is too large

    @property
    def equal(self) -> bool:
        return self.first is None


def compare(reference: Path, run: Path, tolerance: float | None = None, *, dtype: str = "float32") -> Verdict:
    """Compare the recordings in two folders, step by step. `dtype`: what they were made in; without a `tolerance`, what
    is rounding in that type is tolerated."""
    files = files_of(reference)
    if not files or all(map(is_answer, files)):
        raise PacelineError(f"nothing was recorded in {reference}: the script must call trainer.step")
    comparison = _Comparison(tolerance, dtype)
    answers_of_run = [name for name in files_of(run) if is_answer(name) and name not in files]
    for name in sorted({*files, *answers_of_run}, key=lambda name: (step_of(name), not is_answer(name), name)):
        if (first := comparison.of_file(name, reference / name, run / name)) is not None:
            return comparison.verdict(first)
    return comparison.verdict(None)


@dataclass
class _Comparison:
    """What has been seen so far."""

    given: float | None  # tolerance
    dtype: str
    steps: int = 0
    tensors: int = 0
    answers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANSWERS, 0))
    gain: Gain = field(default_factory=Gain)  # of this step
    narrow: str = ""  # what the steps so far have computed in
    needed: str = ""  # what of that, or of an answer, was needed
    largest: Difference | None = None
    rounding: Tensors = field(default_factory=dict)  # by parameter: the largest difference of its gradients so far
    explained: Tensors = field(default_factory=dict)  # by parameter: what the optimizer may have made of that
    undecided: Tensors = field(default_factory=dict)  # by parameter: elements that rounding decides

    def tolerance(self, dtype: str) -> float:
        return TOLERANCES[dtype] if self.given is None else self.given

    def verdict(self, first: Difference | None) -> Verdict:
        left_out = sum(int(mask.sum()) for mask in self.undecided.values()) if self._leaves_out(self.needed) else 0
        tolerance = self.tolerance(self.needed or self.dtype)
        return Verdict(self.steps, self.tensors, self.answers, tolerance, self.needed, left_out, self.largest, first)

    def _leaves_out(self, narrow: str) -> bool:
        return self.dtype != "float64" or (narrow != "" and self.given is None)

    def of_file(self, name: str, reference: Path, run: Path) -> Difference | None:
        """Returns the first tensor of a step, or of an answer, that is too different."""
        step = step_of(name)
        expected, notes = _read(reference)
        narrow, self.gain = notes.get("narrow", ""), Gain.read(notes)
        if self.dtype != "float64":
            narrow = ""
        if is_answer(name):
            narrow = narrower(self.narrow, narrow)
            kind = next(iter(expected or _read(run)[0]), "evaluation").partition("/")[0]
            if not (reference.exists() and run.exists()):
                where = "the other run" if reference.exists() else "one process"
                return Difference(step, kind, 0, 0, f"was not asked for in {where}")
            self.answers[kind] += 1
        else:
            if not run.exists():
                return Difference(step, "the step", 0, 0, "was not reached by the other run")
            narrow = self.narrow = narrower(self.narrow, narrow)
            self.steps += 1
        for found in self._differences(step, expected, _read(run)[0], narrow):
            if found.reason or found.relative > self.tolerance(narrow or self.dtype):
                return found
            if found.relative > self.tolerance(self.dtype):
                self.needed = narrower(self.needed, narrow)
        return None

    def _differences(self, step: int, expected: Tensors, actual: Tensors, narrow: str) -> Iterator[Difference]:
        scales: dict[str, float] = {}
        for name, value in expected.items():
            largest = value.double().abs().nan_to_num().max().item() if value.numel() else 0.0
            scales[_family(name)] = max(scales.get(_family(name), 0.0), largest)
        for name in sorted(expected.keys() | actual.keys(), key=_order):
            if name not in actual:
                yield Difference(step, name, 0, 0, "is missing in the other run")
            elif name not in expected:
                yield Difference(step, name, 0, 0, "is not there in one process")
            else:
                floor = 0.1 * scales[_family(name)]
                if name.startswith("logged/"):  # it may be a sum of numbers as large as the loss that cancel out
                    floor = max(floor, 0.1 * scales["loss"])
                found = self._difference(step, name, expected[name], actual[name], floor, narrow)
                kind, _, parameter = name.partition("/")
                if kind == "gradient" and not found.reason:
                    self._explain(parameter, expected.get(f"optimizer/{parameter}/{SECOND_MOMENT}"))
                self.tensors += 1
                if self.largest is None or found.relative > self.largest.relative:
                    self.largest = found
                yield found

    def _difference(
        self, step: int, name: str, expected: torch.Tensor, actual: torch.Tensor, floor: float, narrow: str
    ) -> Difference:
        if expected.shape != actual.shape:
            return Difference(step, name, 0, 0, f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
        expected, actual = expected.double(), actual.double()
        if not torch.equal(expected.isfinite(), actual.isfinite()):
            return Difference(step, name, 0, 0, "is not finite in one of the runs")
        off = (expected - actual).abs().nan_to_num()
        scale = max(expected.abs().nan_to_num().max().item() if expected.numel() else 1.0, floor)
        kind, _, rest = name.partition("/")
        if kind == "gradient":
            self.rounding[rest] = torch.maximum(off, self.rounding.get(rest, torch.zeros(())))
        elif kind == "model" and rest in self.explained and self.dtype == "float64":
            off = (off - self.explained[rest]).clamp(min=0)
        largest = off.max().item() if off.numel() else 0.0
        if self._leaves_out(narrow):
            tolerance = self.tolerance(narrow or self.dtype)
            if kind == "gradient":
                self.undecided[rest] = self.undecided.get(rest, False) | (off > 0.5 * tolerance * expected.abs())
            elif self.dtype != "float64" or largest > self.tolerance("float64") * scale:
                parameter = rest.rpartition("/")[0] if kind == "optimizer" else rest
                undecided = self.undecided.get(parameter)
                if undecided is not None and undecided.shape == off.shape and undecided.any():
                    largest = off.masked_fill(undecided, 0.0).max().item()
                    self.needed = narrower(self.needed, narrow)
        return Difference(step, name, largest, scale)

    def _explain(self, parameter: str, second_moment: torch.Tensor | None) -> None:
        moved = self.gain.explained(self.rounding[parameter], second_moment)
        self.explained[parameter] = self.explained.get(parameter, torch.zeros(())) + moved


def _read(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Returns the tensors of a file, and what was noted with them; nothing if it is not there."""
    if not path.exists():
        return {}, {}
    with safe_open(path, "pt") as file:
        notes = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    for tensor in tensors.values():
        if tensor.dtype in NARROW and tensor.dim():  # a count of steps has no dims, and no digits to lose
            notes["narrow"] = narrower(notes.get("narrow", ""), name_of(tensor.dtype))
    return {name: torch.view_as_real(it) if it.is_complex() else it for name, it in tensors.items()}, notes


def _family(name: str) -> str:
    """Tensors whose magnitudes can be compared: all gradients, all logged numbers, all `exp_avg` …; a model's are each
    by itself."""
    kind, _, rest = name.partition("/")
    return {"gradient": kind, "logged": kind, "optimizer": f"{kind}/{rest.rpartition('/')[2]}"}.get(kind, name)


def _order(name: str) -> tuple[int, str]:
    return KINDS.index(name.split("/")[0]), name
