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

from paceline.data import Ledger

_SAME = ("length", "seed", "shuffle", "drop_last")


class ScriptPosition:
    """The run's ledger, and how far the script has come."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self._steps_before = 0  # updates of earlier chapters
        self._chapter = -1  # the script's, counted from 0
        self._epochs = 0  # of that chapter, for which the script has called `batches`
        self._ahead: dict[str, Any] | None = None  # the run's notes, until the script has reached their chapter
        self._results: list[list[Any]] = []  # evaluations: chapter, epoch, position, how many before it there; value
        self._last_evaluation = (-1, 0, 0, 0)

    @property
    def steps(self) -> int:
        """Updates of the whole run so far."""
        return self._steps_before + (self.ledger.step if self.ledger is not None else 0)

    @property
    def chapter(self) -> int:
        """The script's, counted from 0; -1 before the first."""
        return self._chapter

    @property
    def script_is_behind(self) -> bool:
        """Whether the script has yet to reach the position of the run."""
        if self._ahead is not None:
            run = (self._ahead["chapter"], self._ahead["ledger"]["epoch"], self._ahead["ledger"]["position"])
            return (self._chapter, self._epochs, 0) < run
        return self.ledger is not None and (self._epochs, 0) < (self.ledger.epoch, self.ledger.position)

    def turn_to(self, asked: Ledger, epochs: int) -> tuple[Ledger, int] | None:
        """The script calls `batches` for `epochs` epochs of `asked`: the ledger to use, and the epoch to stop at.

        None: all of that lies behind.
        """
        current = self.ledger
        same = current is not None and all(getattr(current, name) == getattr(asked, name) for name in _SAME)
        if not same:
            self._chapter += 1
            self._epochs = 0
            self._steps_before, self.ledger = self.steps, asked
        if self._ahead is not None and self._chapter == self._ahead["chapter"]:
            asked.load(self._ahead["ledger"])
            self._steps_before, self.ledger = self._ahead["steps_before"], asked
            self._ahead = None
        elif same and current is not None:
            current.batch_size = asked.batch_size
        self._epochs += epochs
        if self._ahead is not None or self.ledger is None:
            return None
        return self.ledger, self._epochs

    # ── evaluations ──────────────────────────────────────────────────────────────────────────────────────

    def next_evaluation(self) -> list[int]:
        """Names the evaluation that comes now by where it stands, so that a resumed script finds its result again."""
        if self.ledger is None or self.script_is_behind:
            where = (max(self._chapter, 0), self._epochs, 0)
        else:
            where = (self._chapter, self.ledger.epoch, self.ledger.position)
        before = self._last_evaluation[3] + 1 if self._last_evaluation[:3] == where else 0
        self._last_evaluation = (*where, before)
        return [*where, before]

    def next_evaluation_of_script(self) -> list[int]:
        """The same by where the script stands, which replicas with servers have in common."""
        where = (max(self._chapter, 0), self._epochs, 0)
        before = self._last_evaluation[3] + 1 if self._last_evaluation[:3] == where else 0
        self._last_evaluation = (*where, before)
        return [*where, before]

    def recorded(self, evaluation: list[int]) -> tuple[bool, Any]:
        """Whether this one lies behind and its result is known, and the result."""
        if self.script_is_behind:
            for *name, value in self._results:
                if name == evaluation:
                    return True, value
        return False, None

    def record(self, evaluation: list[int], value: Any) -> None:
        self._results.append([*evaluation, value])

    # ── as notes ─────────────────────────────────────────────────────────────────────────────────────────

    def notes(self) -> dict[str, Any]:
        """The run's position, as plain data."""
        return {
            "step": self.steps,
            "steps_before": self._steps_before,
            "chapter": max(self._chapter, 0),
            "ledger": self.ledger.state() if self.ledger is not None else None,
            "results": self._results,
        }

    def resume(self, notes: dict[str, Any]) -> None:
        """The run stands where these notes were taken; the script is at its beginning."""
        self._results = [list(result) for result in notes["results"]]
        self._ahead = notes if notes["ledger"] is not None else None


def with_one_more_step(notes: dict[str, Any], samples: int) -> dict[str, Any]:
    """The notes after an update of `samples` samples that was still open when they were taken."""
    state = notes["ledger"]
    ledger = Ledger(
        state["length"], state["batch_size"], seed=state["seed"], shuffle=state["shuffle"], drop_last=state["drop_last"]
    )
    ledger.load(state)
    ledger.commit_samples(samples)
    return {**notes, "ledger": ledger.state()}
