"""Where a script stands, and where its run stands: not the same after a resume.

A script has no position one could jump to. So one that is resumed, or a replica that is started again, runs from its
first line, and what lies behind the run's position is passed over until the script has caught up:

    script   batches(epochs=2) ── evaluate ── batches(epochs=2) ── evaluate ── …
    run                              ●━━━━━━━━━━━━━▶ epoch 2, sample 128
             yields nothing      recorded     goes on at sample 128

A *chapter* is one ledger: calling `batches` again with the same dataset length, seed and order goes on with its next
epochs; anything else begins the next chapter.
"""

from __future__ import annotations

from typing import Any

from paceline.data.ledger import Ledger
from paceline.evaluations import EvaluationKey, EvaluationResult
from paceline.loop.run_state import RunState

_SAME = ("length", "seed", "shuffle", "drop_last")


class ScriptPosition:
    """The run's ledger, and how far the script has come."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.steps_before = 0  # updates of earlier chapters
        self.chapter = -1  # the script's, counted from 0; -1 before the first
        self.results: list[EvaluationResult] = []
        self._epochs = 0  # of that chapter, for which the script has called `batches`
        self._run: RunState | None = None  # where the run stands, until the script has reached its chapter
        self._last_evaluation: EvaluationKey | None = None

    @property
    def steps(self) -> int:
        """Updates of the whole run so far, as far as the ledger has them."""
        if self._run is not None:
            return self._run.step
        return self.steps_before + (self.ledger.step if self.ledger is not None else 0)

    @property
    def script_is_behind(self) -> bool:
        """Whether the script has yet to reach the position of the run."""
        if self._run is not None and self._run.ledger is not None:
            run = (self._run.chapter, self._run.ledger.epoch, self._run.ledger.position)
            return (self.chapter, self._epochs, 0) < run
        return self.ledger is not None and (self._epochs, 0) < (self.ledger.epoch, self.ledger.position)

    def turn_to(self, asked: Ledger, epochs: int) -> tuple[Ledger, int] | None:
        """Notes that the script calls `batches` for `epochs` epochs of `asked`. Returns the ledger to use, and the
        epoch to stop at; None if all of that lies behind."""
        current = self.ledger
        same = current is not None and all(getattr(current, name) == getattr(asked, name) for name in _SAME)
        if not same:
            self.chapter += 1
            self._epochs = 0
            self.steps_before, self.ledger = self.steps, asked
        if self._run is not None and self.chapter == self._run.chapter:
            assert self._run.ledger is not None
            asked.load(self._run.ledger)
            self.steps_before, self.ledger = self._run.steps_before, asked
            self._run = None
        elif same and current is not None:
            current.take_batch_size(asked.batch_size)
        self._epochs += epochs
        if self._run is not None or self.ledger is None:
            return None
        return self.ledger, self._epochs

    # ── evaluations ──────────────────────────────────────────────────────────────────────────────────────

    def next_evaluation(self, *, in_step: bool) -> EvaluationKey:
        """Returns the key of the evaluation that comes now: where it stands, so that a resumed script finds its result
        again. Replicas that are not `in_step` have only the script's place in common."""
        where = self.place(in_step=in_step)
        last = self._last_evaluation
        same = last is not None and (last.chapter, last.epoch, last.position) == where
        self._last_evaluation = EvaluationKey(*where, number=last.number + 1 if same and last is not None else 0)
        return self._last_evaluation

    def undo_evaluation(self, key: EvaluationKey) -> None:
        """The evaluation that came last was given up: it is none of the run."""
        before = EvaluationKey(key.chapter, key.epoch, key.position, key.number - 1)
        self._last_evaluation = before if key.number else None

    def recorded(self, key: EvaluationKey) -> EvaluationResult | None:
        """Returns the result of an evaluation that lies behind, if it is known."""
        if not self.script_is_behind:
            return None
        return self.result(key)

    def result(self, key: EvaluationKey) -> EvaluationResult | None:
        """Returns what came of that evaluation, if this run or an earlier one has made it."""
        return next((result for result in self.results if result.key == key), None)

    def place(self, *, in_step: bool) -> tuple[int, int, int]:
        """Returns where the script stands, as replicas that are `in_step` or not have it in common."""
        if not in_step or self.ledger is None or self.script_is_behind:
            return max(self.chapter, 0), self._epochs, 0
        return self.chapter, self.ledger.epoch, self.ledger.position

    # ── the run's state ──────────────────────────────────────────────────────────────────────────────────

    def progress(self) -> dict[str, Any]:
        """Returns the fields of the run's state that say how far it has come."""
        return {
            "step": self.steps,
            "steps_before": self.steps_before,
            "chapter": max(self.chapter, 0),
            "ledger": self.ledger.record() if self.ledger is not None else None,
            "results": list(self.results),
        }

    def resume(self, state: RunState) -> None:
        """The run stands where `state` was taken; the script is at its beginning."""
        self.results = list(state.results)
        self._run = state if state.ledger is not None else None
