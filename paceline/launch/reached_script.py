"""A script, run in this process as far as its evaluation, for whoever wants its model, its metric and its samples."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from paceline.checkpoint_note import CheckpointNote
from paceline.errors import InvalidInput, LaunchError
from paceline.launch.script import run_script
from paceline.run_place import PLACE_VARIABLE, EvaluationWanted, Place
from paceline.trial_values import TRIAL_VARIABLE

if TYPE_CHECKING:
    from paceline.loop.reached import EvaluationReached


class ScriptEnded(LaunchError):
    """It has ended by itself, before it came as far; what it said last, on stderr, may tell why."""


class ReachedScript(msgspec.Struct, frozen=True, kw_only=True):
    """A script that is to be run as far as it evaluates; `metric`: the one that is wanted."""

    script: str
    module: bool = False
    metric: str | None = None

    @property
    def wanted(self) -> EvaluationWanted:
        """What its Trainer is asked for."""
        return EvaluationWanted(None if self.metric is None else self.metric.partition("/")[0])

    def run(self, made: CheckpointNote, place: Place) -> EvaluationReached:
        """Runs it with the arguments that a checkpoint's model was made with; returns what it has in hand then."""
        from paceline.loop.reached import EvaluationReached

        os.environ[PLACE_VARIABLE] = msgspec.json.encode(place).decode()
        kept_arguments, kept_path = sys.argv, list(sys.path)
        sys.argv = [sys.argv[0], *(["-m"] if self.module else []), self.script, *made.arguments]
        os.environ.pop(TRIAL_VARIABLE, None)
        if made.trial is not None:
            os.environ[TRIAL_VARIABLE] = msgspec.json.encode(made.trial).decode()
        with_flags = f"{self.script} {' '.join(made.arguments)}".rstrip()
        try:
            run_script(place)
        except EvaluationReached as reached:
            return reached
        except SystemExit as end:
            if end.code:
                raise ScriptEnded(
                    f"{with_flags} ended with exit code {end.code} before it evaluated anything"
                ) from None
        finally:
            sys.argv, sys.path[:] = kept_arguments, kept_path
        if place.reaching != EvaluationWanted():
            first = self.run(made, msgspec.structs.replace(place, reaching=EvaluationWanted()))
            raise InvalidInput("metric", self.metric, f"{with_flags} tells none of this name, but {first.name!r}")
        raise LaunchError(
            f"{with_flags} ended and evaluated nothing by name: call trainer.evaluate(…, name='accuracy')"
        )
