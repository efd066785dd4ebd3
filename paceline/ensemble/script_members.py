"""The members of an ensemble and their validation set, out of a training script.

`python -m paceline.ensemble.script_members REQUEST RESULT` runs the script, in one process, as far as its evaluation,
and once for each list of arguments that members were trained with, since another width is another model. Nothing is
trained. Then the ensemble is judged, and the result written into a file.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.checkpoint_note import CheckpointNote, note_beside
from paceline.combining import Kind
from paceline.errors import CheckpointError, DataError, ModelError
from paceline.launch.reached_script import ReachedScript
from paceline.launch.script_task import answer
from paceline.run_place import find_place

if TYPE_CHECKING:
    from paceline.loop.reached import EvaluationReached


class MemberFile(msgspec.Struct, frozen=True):
    """A checkpoint, and what its model is made with."""

    path: str
    name: str
    made: CheckpointNote

    @property
    def key(self) -> bytes:
        """The same for members that one run of the script makes models for."""
        return msgspec.json.encode((self.made.arguments, self.made.trial))


class JudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be judged, and how."""

    script: str
    module: bool = False
    members: list[MemberFile]
    metric: str | None = None
    maximize: bool = True
    combine: str = "mean"
    outputs: Kind | None = None
    class_dim: int | None = None


def _judged(request: JudgeRequest) -> msgspec.Struct:
    from torch import nn

    from paceline.data import Ledger, open_feed
    from paceline.ensemble.judging import Judge
    from paceline.loop.validation import ValidationSet
    from paceline.serve.predictor import load

    script = ReachedScript(script=request.script, module=request.module, metric=request.metric)
    reached: dict[bytes, EvaluationReached] = {}
    models: dict[str, nn.Module] = {}
    described: dict[str, str] = {}  # the validation set, by member
    for member in request.members:
        key = member.key
        if key not in reached:
            reached[key] = script.run(member.made, find_place())
        try:
            model = copy.deepcopy(reached[key].model)
        except Exception as error:
            expected = f"it cannot be copied for each member ({error}), let copy.deepcopy work"
            raise ModelError("model", type(reached[key].model).__name__, expected) from error
        try:
            load(member.path, model)
        except CheckpointError as error:
            beside = note_beside(Path(member.path)).name
            raise CheckpointError(
                f"{error} (made with {member.made.words}; {beside} beside it may say others)"
            ) from error
        models[member.name] = model
    feeds = contextlib.ExitStack()
    with feeds:
        for member in request.members:
            data = reached[member.key].data
            feed = open_feed(data.dataset, data.collate, data.workers or 0, begin_worker=data.begin_worker)
            described[member.name] = f"{feed.length} samples of {feed.description()}"
            if described[member.name] != described[request.members[0].name]:
                expected = "that of the first member is another, give all the same validation set"
                raise DataError(f"validation set of {member.name}", described[member.name], expected)
        feeds.enter_context(feed)
        if not feed.length:
            raise DataError("validation set", described[member.name], "evaluate on one that has samples")
        end = reached[request.members[-1].key]
        ledger = Ledger(feed.length, end.at_once, shuffle=False)
        load_samples = lambda part: feed.load(ledger, 0, part)  # noqa: E731
        validation = ValidationSet(
            load_samples, feed.length, end.at_once, end.metric, end.loss, end.name, request.metric
        )
        return Judge(models, validation).judge(
            request.combine, request.outputs, request.class_dim, maximize=request.maximize
        )


if __name__ == "__main__":
    answer(JudgeRequest, _judged)
