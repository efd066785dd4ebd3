"""Random numbers of operators on several devices, drawn as one process draws them.

One process draws for one operator after another. A device has some of these operators, and to come to the right numbers
it draws for the others too, and throws that away: how much an operator draws follows from shapes alone, or it is
refused. Operators may be computed in another order than that of the graph; then the generator is put back to where it
was in theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from paceline.errors import ModelError
from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import name_of
from paceline.torch_private import tree_map

_BY_SHAPE = frozenset(
    (
        "dropout", "dropout_", "native_dropout", "alpha_dropout", "alpha_dropout_", "feature_dropout",
        "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "bernoulli", "bernoulli_", "rand",
        "rand_like", "randn", "randn_like", "randint", "randint_like", "normal", "normal_", "uniform_", "exponential_",
        "random_", "randperm", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu",
    )
)  # fmt: skip


class RandomOrder:
    """The operators of a graph that draw random numbers, and how far the generator has come."""

    def __init__(self, call: CallGraph, own: Callable[[fx.Node], bool]) -> None:
        """`own` says which operators this device computes."""
        self._call = call
        self._nodes = [node for node in call.nodes if _draws(node)]
        self._own = [own(node) for node in self._nodes]
        self._ones: dict[Any, torch.Tensor] = {}  # in the place of values
        for node in self._nodes:
            if name_of(node) not in _BY_SHAPE:
                raise ModelError(
                    "wavefront",
                    name_of(node),
                    "how many random numbers it draws depends on values, so devices cannot draw what one process "
                    "draws; leave it out, or use --replicas",
                )
        self._done = 0
        self._ahead: torch.Tensor | None = None  # where the generator stands in the graph, if it was put back since
        self._passed: dict[int, torch.Tensor] = {}  # where it stood before own operators that are yet to come

    def between(self) -> dict[fx.Node, Callable[[], None]]:
        """Returns what is to be called before each operator of this device."""
        return {node: partial(self._come_to, n) for n, node in enumerate(self._nodes) if self._own[n]}

    def begin(self) -> None:
        """A computation of the whole graph begins."""
        self._done, self._ahead, self._passed = 0, None, {}

    def finish(self) -> None:
        """Brings the generator where it is in one process."""
        self._draw_until(len(self._nodes))

    def _come_to(self, number: int) -> None:
        if number < self._done:
            if self._ahead is None:
                self._ahead = torch.get_rng_state()
            torch.set_rng_state(self._passed.pop(number))
        else:
            self._draw_until(number)
            self._done = number + 1  # by the operator itself

    def _draw_until(self, number: int) -> None:
        if self._ahead is not None:
            torch.set_rng_state(self._ahead)
            self._ahead = None
        for other in range(self._done, number):
            if self._own[other]:
                self._passed[other] = torch.get_rng_state()
            self._draw(self._nodes[other])
        self._done = number

    def _draw(self, node: fx.Node) -> None:
        """Draws what an operator draws."""
        values = self._call.values
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: tree_map(self._stand_in, values[source]))
        with torch.no_grad():
            node.target(*args, **kwargs)  # type: ignore[operator]

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        like = value.shape, value.stride(), value.dtype
        if like not in self._ones:
            self._ones[like] = torch.empty_strided(*like[:2], dtype=value.dtype).fill_(1)
        return self._ones[like]


def _draws(node: fx.Node) -> bool:
    """Returns whether an operator may draw random numbers: not one that drops nothing."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    return not (name_of(node).rstrip("_").endswith("dropout") and _is_off(node.args))


def _is_off(arguments: Sequence[Any]) -> bool:
    return len(arguments) > 2 and (arguments[2] is False or arguments[1] == 0.0)
