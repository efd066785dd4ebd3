"""What `paceline verify` says: the verdict, in which precision it was found, and what could not be asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from paceline.cli.run_plan import RunPlan

if TYPE_CHECKING:
    from paceline.verify.compare import Verdict


@dataclass(frozen=True)
class Precision:
    """What is computed in, and why that is not float64 if nobody has asked for another."""

    dtype: Literal["float64", "float32"]
    because: str | None = None


@dataclass(frozen=True)
class VerifyResult:
    """A verdict, and how it came about."""

    verdict: Verdict
    precision: Precision
    asked: bool  # the loss in eval mode was compared
    called: bool  # and what the model answers to the call that the loss makes
    not_asked: str | None  # why that was not possible

    def as_json(self) -> str:
        verdict = asdict(self.verdict)
        answers = verdict.pop("answers")
        fields = {
            "equal": self.verdict.equal,
            "dtype": self.precision.dtype,
            "because": self.precision.because,
            **verdict,
            "narrow": self.verdict.narrow or None,
            "evaluations": answers["evaluation"] - self.asked,
            "predictions": answers["prediction"],
            "loss_in_eval_mode": self.asked,
            "call_in_eval_mode": self.called,
            "not_asked": self.not_asked,
        }
        return msgspec.json.encode(fields).decode()

    def in_words(self, plan: RunPlan) -> str:
        replicas = _count(plan.strategy.replicas, "replica")
        split = plan.strategy.settings.get("split")
        against = f"{replicas}{f', {split},' if split is not None else ''} against one process"
        against += f" in {self.precision.dtype}"
        verdict = self.verdict
        if verdict.first is not None:
            return "; ".join([f"different, {against}: {verdict.first}", *self._remarks()])
        compared = [f"{verdict.tensors} tensors over {_count(verdict.steps, 'step')}", *self._answers()]
        rounding = f"the largest difference is rounding ({verdict.largest})"
        return "; ".join([f"equal, {against}: {', '.join(compared)}", rounding, *self._remarks()])

    def _answers(self) -> list[str]:
        counts = self.verdict.answers
        said = ["the loss in eval mode"] if self.asked else []
        if self.called:
            said.append("the model's answer")
        if evaluations := counts["evaluation"] - self.asked:
            said.append(_count(evaluations, "evaluation"))
        if counts["prediction"]:
            said.append(_count(counts["prediction"], "prediction"))
        return [f"with {_listed(said)}"] if said else []

    def _remarks(self) -> list[str]:
        verdict, remarks = self.verdict, []
        if self.precision.because is not None:
            remarks.append(f"not in float64, because {self.precision.because}: {verdict.tolerance:g} is tolerated")
        if verdict.narrow:
            remarks.append(f"the script itself computes in {verdict.narrow}: {verdict.tolerance:g} is tolerated there")
        if verdict.left_out:
            remarks.append(f"{_count(verdict.left_out, 'element')} with gradients of pure rounding left out")
        if self.not_asked is not None:
            remarks.append(f"no loss in eval mode was compared ({self.not_asked})")
        return remarks


def _listed(words: list[str]) -> str:
    """
    >>> _listed(["one"]), _listed(["one", "two", "three"])
    ('one', 'one, two and three')
    """
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


def _count(number: int, what: str) -> str:
    """
    >>> _count(1, "step"), _count(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
