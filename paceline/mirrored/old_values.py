"""A model of which other hosts have newer values refuses to be used, rather than to answer with old ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.mirrored.one_host import OneHost


class OldValues:
    """Watches over the model of one process. Where its host has all parameters there is nothing to do."""

    def __init__(self, model: nn.Module, hosts: OneHost) -> None:
        self._hosts, self._allowed = hosts, False
        self._hooks: list[Any] = []
        if not hosts.has_all:
            self._hooks = [
                model.register_forward_pre_hook(self._refuse),
                model.register_state_dict_pre_hook(self._refuse),  # type: ignore[no-untyped-call]
            ]

    def _refuse(self, *_: Any) -> None:
        self.check()

    def check(self) -> None:
        """Raises if the model has old values."""
        if self._hosts.apart and not self._allowed:
            raise ModelError(
                "model",
                "used between two steps",
                f"stages are on {self._hosts.most} hosts, and this one has old values of parameters of the others; "
                "call trainer.predict, or use it after an evaluation, a save or the end of batches: they bring the new",
            )

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Lets it be used."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def close(self) -> None:
        """Lets go of the model."""
        for hook in self._hooks:
            hook.remove()
