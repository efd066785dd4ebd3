"""What a call gives back when it is not waited for: torch's `Work`."""

# Only the forms in which torch.distributed itself calls are there.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from paceline.torch_group.flat_tensors import FlatTensor, outside_inference
from paceline.torch_group.tagged_messages import Receive, TaggedMessages


class Finished(Work):
    """Of a call that was finished when it returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Receiving(Finished):
    """Of a receive, which is done when somebody waits."""

    def __init__(self, messages: TaggedMessages, tensor: torch.Tensor, source: int | None, tag: int) -> None:
        super().__init__([tensor])
        self._messages = messages
        with outside_inference():
            self._into = FlatTensor(tensor)
        self._receive = Receive(self._into.flat, source, tag)
        messages.ask(self._receive)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._messages.complete(self._receive, seconds(timeout))
        self._into.write_back()
        return True

    def is_completed(self) -> bool:
        self._messages.take_in()
        return self._receive.complete

    is_success = is_completed

    def source_rank(self) -> int:
        assert self._receive.source is not None
        return self._receive.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        self.wait()
        return super().get_future()


def seconds(timeout: timedelta | None) -> float | None:
    """None where torch means that nothing was said: it does so with less than nothing, and Work.wait with 0."""
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
