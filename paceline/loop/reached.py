"""A script that was run for its model and its validation set, and has come to the evaluation where it has both.

Nothing is trained on the way there: `batches` yields nothing, `resume` and `save` do nothing. The script ends at the
evaluation by an exception, which carries what it had in hand to whoever has run it (`ensemble/script_members.py`).
"""

from __future__ import annotations

from torch import nn

from paceline.data.settings import DataSettings
from paceline.loop.evaluation import Metric
from paceline.split.cut import Loss


class EvaluationReached(SystemExit):
    """Ends a script, and has what it would evaluate: which model, by which metric, on which samples."""

    def __init__(
        self, model: nn.Module, loss: Loss, metric: Metric, data: DataSettings, at_once: int, name: str
    ) -> None:
        super().__init__(0)
        self.model, self.loss, self.metric = model, loss, metric
        self.data, self.at_once = data, at_once
        self.name = name
