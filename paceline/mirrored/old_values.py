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
            for module in model.modules():  # a method of the model's may use some of them
                self._hooks.append(module.register_forward_pre_hook(_Refusal(self)))
                self._hooks.append(
                    module.register_state_dict_pre_hook(_Refusal(self))  # type: ignore[no-untyped-call]
                )

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
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def close(self) -> None:
        """Lets go of the model."""
        for hook in self._hooks:
            hook.remove()


class _Refusal:
    """What is called before a module is used. A copy of the model is nobody's."""

    def __init__(self, watch: OldValues) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        self._watch.check()

    def __deepcopy__(self, _: dict[int, Any]) -> _Nothing:
        return _Nothing()

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *_: Any) -> None:
        """Nobody watches."""
