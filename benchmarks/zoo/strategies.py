"""What is typed for each strategy of the table, and what its result has to be equal to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.zoo.models import Model

CUT_DIMS = ("heads", "hidden", "channels", "vocab")  # along which a layout cuts a model, those that it has


@dataclass(frozen=True)
class Strategy:
    """A way of distributing.

    `masks`: those of dropout are the ones of one process. Replicas, and stages of a pipeline, draw others, so dropout
    is switched off there. `parts`: of a batch, each of which has a loss of its own. `passes`: parts that BatchNorm sees
    one by one. Where these count, the result is compared with one process that accumulates over as many. `twice`:
    compared with the same run again, bit for bit, with dropout.
    """

    name: str
    words: str
    flags: tuple[str, ...]
    masks: bool = False
    parts: int = 1
    passes: int = 1
    statistics: bool = True  # BatchNorm's running ones are those of one process too
    twice: bool = False

    def applies(self, model: Model) -> bool:
        """Whether there is anything to try."""
        needed = {"tiles": model.images, "wavefront": model.recurrent, "dropout": model.dropout}
        return needed.get(self.name, True)

    def arguments(self, model: Model) -> list[str]:
        """What the script is given under this strategy."""
        keep = self.masks or self.twice or not model.dropout
        return [model.name, *([] if keep else ["--no-dropout"])]

    def arguments_alone(self, model: Model) -> list[str]:
        """The same for the one process that the result is compared with."""
        passes = self.parts if model.pairs else self.passes if model.batchnorm else 1
        accumulate = ["--accumulate", str(passes)] if passes > 1 else []
        return [*self.arguments(model), *accumulate]

    def flags_for(self, parameters: Collection[Collection[str]]) -> list[str]:
        """What `paceline run` is given; `parameters` are the names that `paceline dims` has for the dims of each.

        Two dims of one parameter cannot lie along the same axis: of those the first one is cut."""
        chosen: list[str] = []
        for dim in CUT_DIMS:
            beside = {other for dims in parameters if dim in dims for other in dims}
            if beside and not beside & set(chosen):
                chosen.append(dim)
        return [",".join(f"{dim}=model" for dim in chosen) if flag == "DIMS" else flag for flag in self.flags]

    @property
    def asks_for_dims(self) -> bool:
        return "DIMS" in self.flags


def _listed() -> tuple[Strategy, ...]:
    return (
        Strategy("mirrored", "2 replicas", ("--replicas", "2"), parts=2),
        Strategy("mirrored3", "3 replicas", ("--replicas", "3"), parts=3),
        Strategy(
            "servers",
            "2 replicas, 2 servers",
            ("--replicas", "2", "--servers", "2"),
            parts=2,
            passes=2,
            statistics=False,
        ),
        Strategy("layout", "a layout over 2", ("--mesh", "model=2", "--layout", "DIMS"), masks=True),
        Strategy("stages", "2 stages, 2 micro-batches", ("--stages", "2", "--micro-batches", "2"), parts=2, passes=2),
        Strategy("tiles", "2 rows of tiles", ("--tiles", "2"), masks=True),
        Strategy("wavefront", "a wavefront over 2", ("--wavefront", "2", "--time-block", "4"), masks=True),
        Strategy("dropout", "2 replicas with dropout, twice", ("--replicas", "2"), twice=True),
    )


STRATEGIES = {strategy.name: strategy for strategy in _listed()}
