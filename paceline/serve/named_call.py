"""Tensors by name, as clients send them, and the call of the model that they make up; and its answer by name again.

How the model is called is known from the script's own loss: which tensors by position, which by keyword, which inside
of a list or a dict, and what else is given with them. Each tensor is named after the parameter it is given for. Where
nobody could tell, tensors go by keyword if the model has parameters of these names, and in their order otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.optim.models import own_state
from paceline.serve.served_tensor import ANY, DATATYPES, ModelDescription, ServedTensor
from paceline.split.cut import Example

MOST_EXAMPLE = 4096  # numbers of an example that is shown


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of this name goes."""

    name: str


class NamedCall:
    """How tensors by name become a call of the model."""

    def __init__(self, model: nn.Module, example: Example | None) -> None:
        self._parameters = _parameter_names(model)
        self.tensors: dict[str, torch.Tensor] = {}  # of the example
        self._structure = self._slots(example) if example is not None else None

    def __call__(self, given: Mapping[str, torch.Tensor]) -> Example:
        """Returns the call that these tensors make up."""
        if self._structure is not None:
            args, kwargs = _filled(self._structure, given)
            return args, kwargs
        if set(given) <= set(self._parameters):
            return (), dict(given)
        return tuple(given.values()), {}

    @property
    def rows(self) -> int:
        """Returns the size of the first dim that all tensors of the example have in common; 0: there is none."""
        sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in self.tensors.values()}
        return sizes.pop() if len(sizes) == 1 else 0

    def some_rows(self, count: int) -> dict[str, torch.Tensor]:
        """Returns the example's tensors, the first rows of them if they have rows."""
        return {name: tensor[:count] if self.rows else tensor for name, tensor in self.tensors.items()}

    def _slots(self, example: Example) -> Any:
        args, kwargs = example
        names = [*self._parameters, *(f"input_{number}" for number in range(len(args)))]
        positional = [self._slot(names[number], value) for number, value in enumerate(args)]
        return tuple(positional), {name: self._slot(name, value) for name, value in kwargs.items()}

    def _slot(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value.detach()
            return _Slot(name)
        if isinstance(value, dict):
            return {key: self._slot(f"{name}.{key}", entry) for key, entry in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._slot(f"{name}.{number}", entry) for number, entry in enumerate(value))
        return value


def named_outputs(answer: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Returns the tensors and numbers in a model's answer by name; what else there is in it is left out.

    >>> list(named_outputs({"logits": torch.ones(2), "hidden": [torch.ones(1), None]}))
    ['logits', 'hidden.0']
    """
    if isinstance(answer, torch.Tensor):
        return {name or "output": answer}
    if isinstance(answer, bool | int | float):
        return {name or "output": torch.tensor(answer)}
    entries: Any = ()
    if isinstance(answer, Mapping):
        entries = answer.items()
    elif isinstance(answer, tuple) and hasattr(answer, "_asdict"):
        entries = answer._asdict().items()
    elif isinstance(answer, list | tuple):
        entries = ((f"{'' if name else 'output_'}{number}", entry) for number, entry in enumerate(answer))
    found: dict[str, torch.Tensor] = {}
    for key, entry in entries:
        found |= named_outputs(entry, f"{name}.{key}" if name else str(key))
    return found


def describe(model: nn.Module, call: NamedCall) -> ModelDescription:
    """Returns what the script's own call tells of the model: what it takes, and by computing it, what it gives."""
    kind = type(own_state(model)).__name__
    if not call.tensors:
        return ModelDescription(kind=kind)
    inputs = [_spec(name, tensor, bool(call.rows)) for name, tensor in call.tensors.items()]
    few = call.some_rows(2)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            args, kwargs = call(few)
            answer = named_outputs(model(*args, **kwargs))
    except Exception:  # a model may have no answer in eval mode; whoever asks it will be told
        return ModelDescription(kind=kind, inputs=inputs, example=_shown(call))
    finally:
        model.train(was_training)
    rows = min(2, call.rows)
    in_rows = bool(rows) and all(tensor.dim() and tensor.shape[0] == rows for tensor in answer.values())
    outputs = [_spec(name, tensor, in_rows) for name, tensor in answer.items()]
    return ModelDescription(kind=kind, inputs=inputs, outputs=outputs, in_rows=in_rows, example=_shown(call))


def _spec(name: str, tensor: torch.Tensor, rows: bool) -> ServedTensor:
    dtype = str(tensor.dtype).removeprefix("torch.").replace("bfloat16", "float32")
    shape = list(tensor.shape)
    return ServedTensor(name, DATATYPES.get(dtype, dtype.upper()), [ANY, *shape[1:]] if rows else shape)


def _shown(call: NamedCall) -> dict[str, list[Any]] | None:
    tensors = call.some_rows(1)
    if sum(tensor.numel() for tensor in tensors.values()) > MOST_EXAMPLE:
        return None
    return {name: tensor.tolist() if tensor.dim() else [tensor.item()] for name, tensor in tensors.items()}


def _filled(structure: Any, given: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(structure, _Slot):
        return given[structure.name]
    if isinstance(structure, dict):
        return {key: _filled(entry, given) for key, entry in structure.items()}
    if isinstance(structure, list | tuple) and not hasattr(structure, "_fields"):
        return type(structure)(_filled(entry, given) for entry in structure)
    return structure


def _parameter_names(model: nn.Module) -> list[str]:
    """Returns the names of what the model's forward is given."""
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(own_state(model).forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in (*fixed, inspect.Parameter.KEYWORD_ONLY)]
