"""What HTTP asks: something that answers, in versions. One model with its processes is such (`model_pool`), and so are
several that answer as one (`ensemble_pool`)."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.serve.batching import Refusal
from paceline.serve.serving_metrics import ServingMetrics

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ServedAnswer:
    """An answer, and where it came from."""

    outputs: dict[str, np.ndarray]
    version: int
    process: str
    requests: int  # that were computed together with it, itself included
    waited_s: float
    computed_s: float
    step: int | None = None  # of the training that the version was taken from
    members: dict[str, ServedAnswer] = field(default_factory=dict)  # of an ensemble: those that it is made of
    missing: dict[str, str] = field(default_factory=dict)  # and those that it is not, with why

    @property
    def told(self) -> dict[str, Any]:
        """Returns what people and programs are told of it, beside the outputs."""
        told: dict[str, Any] = {
            "answered_by": self.process,
            "together": self.requests,
            "waited_s": self.waited_s,
            "computed_s": self.computed_s,
        }
        if self.step is not None:
            told["step"] = self.step
        if self.members:
            told["members"] = {name: {"version": one.version, **one.told} for name, one in self.members.items()}
            told["missing"] = self.missing
        return told


class ServedModel(Protocol):
    """Answers requests, with processes that it has."""

    metrics: ServingMetrics

    @property
    def version(self) -> int | None:
        """Returns the version that answers; None if there is none."""

    @property
    def versions(self) -> list[int]:
        """Returns the versions that can be asked by number."""

    @property
    def is_ready(self) -> bool:
        """Returns whether requests are answered."""

    @property
    def problem(self) -> str:
        """Returns what is wrong with the source of its versions; empty if nothing is."""

    @property
    def most_rows(self) -> int:
        """Returns how many rows are computed together at most."""

    @property
    def processes(self) -> dict[str, int]:
        """Returns the numbers of the processes by name."""

    def refusal(self, deadline_s: float) -> Refusal | None:
        """Returns why no request whatsoever could be answered in that time; None: one might."""

    def ask(self, inputs: Arrays, rows: int, deadline_s: float, version: int | None) -> Future[ServedAnswer]:
        """Returns what will have the answer, or the RequestError that says why there is none; one that is refused at
        once may raise it. Whoever cancels it has gone away."""

    async def load(self) -> int:
        """Takes what its source has now as a new version, and returns its number."""

    async def unload(self) -> None:
        """Has nobody answer any more."""

    async def look(self) -> None:
        """Is called now and then: loads what has changed, ends processes that are stuck."""

    async def close(self) -> None:
        """Ends all processes."""
