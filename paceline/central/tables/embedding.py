"""`nn.Embedding(sparse=True)` on a replica: looks its rows up on the servers.

The module keeps its place in the model. Its forward finds the rows that the batch needs, gets just those, and looks up
in them; backward gives a gradient of just those. Its weight, which may be larger than the replica's memory, is handed
over to the servers and let go: it keeps its shape, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.central.shards import TableSpec
from paceline.central.tables.tables import Rows
from paceline.errors import ModelError
from paceline.optim.models import own_state


@dataclass
class Found:
    """What a call of a table looks up: its rows, each once, their values, and which of them is where in the input."""

    rows: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


Find = Callable[[int, torch.Tensor], Found]  # table, input


class Lookup:
    """One table of a model."""

    def __init__(self, name: str, module: nn.Embedding, number: int) -> None:
        if module.max_norm is not None or module.scale_grad_by_freq:
            raise ModelError("model", name, "a table on servers has neither max_norm nor scale_grad_by_freq")
        self.name = name
        self.number = number
        self.module = module
        self.rows, self.width = module.num_embeddings, module.embedding_dim
        self._find: Find | None = None
        self._looked: list[Found] = []
        module.forward = self._forward  # type: ignore[method-assign]

    def spec(self, group: int | None) -> TableSpec:
        """Return how the servers know it; `group`: of the optimizer, that it is in."""
        if group is None:
            raise ModelError("model", self.name, "the optimizer does not have it; give it all parameters of the model")
        return TableSpec(self.name, self.rows, self.width, group, self.module.weight.is_meta)

    def connect(self, find: Find) -> None:
        """From now on the values are on the servers."""
        self._find = find
        self.module.weight.on_servers = True  # type: ignore[attr-defined]
        if not self.module.weight.is_meta:
            # One number, seen as the whole table: the shape stays what it was.
            self.module.weight.data = torch.zeros(1).expand(self.rows, self.width)

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._find is None:
            return F.embedding(input, self.module.weight, self.module.padding_idx)
        found = self._find(self.number, input)
        if torch.is_grad_enabled() and self.module.weight.requires_grad:
            found.values.requires_grad_()
            self._looked.append(found)
        padding = None
        if self.module.padding_idx is not None:  # its row gets no gradient
            at = torch.nonzero(found.rows == self.module.padding_idx)
            padding = int(at[0]) if len(at) else None
        return F.embedding(found.places, found.values, padding)

    def rows_of(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows that an input names, each once, and which of them is where."""
        if input.numel() and not (int(input.min()) >= 0 and int(input.max()) < self.rows):
            raise ModelError("model", self.name, f"its input has rows beyond the {self.rows} there are")
        rows, places = torch.unique(input, return_inverse=True)
        return rows, places

    def take_gradient(self) -> Rows:
        """Return the gradient of everything looked up since the last time."""
        looked, self._looked = self._looked, []
        used = [(each.rows, each.values.grad) for each in looked if each.values.grad is not None]
        if not used:
            return Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, self.width))
        return Rows(torch.cat([rows for rows, _ in used]), torch.cat([grad for _, grad in used]))

    def forget(self) -> None:
        self._looked.clear()

    def close(self) -> None:
        del self.module.forward


def find_tables(model: nn.Module) -> list[Lookup]:
    """Return the model's sparse embeddings, in order."""
    own = own_state(model)
    uses: dict[int, int] = {}
    for module in own.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: list[Lookup] = []
    for name, module in own.named_modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            weight = f"{name}.weight" if name else "weight"
            if uses[id(module.weight)] > 1:
                raise ModelError("model", weight, "another module uses it too; give that one its own, or sparse=False")
            if module.weight.dtype != torch.float32:
                raise ModelError("model", weight, "a table on servers is of type float32")
            found.append(Lookup(weight, module, len(found)))
    return found
