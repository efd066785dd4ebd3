"""Which layers are in int8: all that can be, less the most sensitive ones, until the metric is within its bound.

Sensitive is a layer by which, alone in int8, the model's answers change most. That is one answer a layer. The metric,
which is a whole evaluation, is looked at for few choices: all in int8; one layer in float, two, four …; then between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.errors import ModelError
from paceline.quantize.swaps import Swap
from paceline.torch_private import tree_leaves


class Int8Choice:
    """The layers of a model that can be in int8, in groups of those that share a weight."""

    def __init__(self, groups: Sequence[Sequence[Swap]], answer: Callable[[], Any]) -> None:
        """`answer()` has the model answer something, in eval mode."""
        self._groups = groups
        self.errors: dict[str, float] = {}  # by layer: of the answers, when its group alone is in int8
        exact = answer()
        for group in groups:
            self.use([group])
            error = difference_of(exact, answer())
            self.errors |= {swap.name: error for swap in group}
        self._ranked = sorted(groups, key=lambda group: -self.errors[group[0].name])
        self.use([])

    def use(self, groups: Iterable[Sequence[Swap]]) -> None:
        """Has these groups in int8, and the others in float."""
        chosen = [swap.name for group in groups for swap in group]
        for group in self._groups:
            for swap in group:
                swap.put(int8=swap.name in chosen)

    def settle(self, measure: Callable[[], float], drop: Callable[[float], float], most: float) -> list[Swap]:
        """Returns the layers that are in int8 from now on: as many as the metric allows, `most` points worse than with
        all in float. `measure()` evaluates; `drop` says how many points a value is worse."""
        dropped: dict[int, float] = {}  # by how many groups are in float

        def is_within(in_float: int) -> bool:
            if in_float == len(self._ranked):
                return True
            self.use(self._ranked[in_float:])
            dropped[in_float] = drop(measure())
            return dropped[in_float] <= most

        fails, holds = -1, 0
        while not is_within(holds):
            fails, holds = holds, min(max(1, 2 * holds), len(self._ranked))
        while holds - fails > 1:
            middle = (fails + holds) // 2
            if is_within(middle):
                holds = middle
            else:
                fails = middle
        if holds == len(self._ranked):
            self.use([])
            best = min(dropped, key=lambda count: dropped[count])
            left = len(self._ranked) - best
            layers = f"{left} of {len(self._ranked)} layers" if left > 1 else f"only {self._ranked[-1][0].name}"
            raise ModelError(
                "max-drop", most, f"with {layers} in int8 it drops by {dropped[best]:.3g} points already, give more"
            )
        chosen = self._ranked[holds:]
        self.use(chosen)
        names = {swap.name for group in chosen for swap in group}
        return [swap for group in self._groups for swap in group if swap.name in names]


def difference_of(exact: Any, found: Any) -> float:
    """Returns how far an answer is from the exact one, of its size."""
    pairs = [
        (a.double(), b.double())
        for a, b in zip(tree_leaves(exact), tree_leaves(found), strict=True)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
    ]
    size = sum(float(a.square().sum()) for a, _ in pairs)
    return (sum(float((a - b).square().sum()) for a, b in pairs) / size) ** 0.5 if size else 0.0
