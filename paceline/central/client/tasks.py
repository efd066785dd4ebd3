"""What replicas do together between steps, from one replica's side: parts of a task, until it is done by whomever."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.deadlines import CallLimit
from paceline.stoppable_calls import CallGivenUp, check_in_time, in_time

LOOK_EVERY_S = 0.005  # with a limit, which a server does not know of


def do_task(
    chief: Connection,
    ask: requests.Task,
    work: Callable[[range], list[float]],
    model: nn.Module,
    mine: Mapping[str, Any],
    limit: CallLimit | None,
) -> replies.Result:
    """Do parts of a task until it is done, and return its result. After its `limit` this replica gives its part back,
    and says who is late: itself, or those whom it waits for. `mine`: what every request of this replica has."""
    while isinstance(answer := _come_to(chief, ask, limit), replies.TaskPart):
        try:
            with in_time(model, limit):
                values = work(range(answer.start, answer.stop))
            check_in_time(limit)
        except CallGivenUp:
            assert limit is not None
            chief.call(requests.TaskGivenBack(**mine, key=ask.key), replies.Done)
            raise limit.exceeded(f"replica {ask.replica}") from None
        chief.call(requests.TaskDone(**mine, key=ask.key, part=answer.part, values=values), replies.Done)
    return answer


def _come_to(chief: Connection, ask: requests.Task, limit: CallLimit | None) -> replies.TaskPart | replies.Result:
    kinds = (replies.TaskPart, replies.Result)
    if limit is None:
        return chief.wait(ask, kinds)  # type: ignore[no-any-return]
    while isinstance(answer := chief.call(ask, (*kinds, replies.Waiting)), replies.Waiting):
        if limit.is_late():
            raise limit.exceeded(answer.why)
        time.sleep(LOOK_EVERY_S)
    return answer  # type: ignore[no-any-return]
