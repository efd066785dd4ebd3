"""A user's model, as owners see it: named parameters, their optimizer groups, its buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.torch_private import inside_compiled


def own_state(model: nn.Module) -> nn.Module:
    """The module whose state_dict has the user's own keys: a compiled model wraps it."""
    inner = inside_compiled(model)
    return model if inner is None else inner


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Names by parameter. A tied parameter has the first of its names."""
    return {parameter: name for name, parameter in own_state(model).named_parameters()}


def grouped_parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter, int | None]]:
    """`(name, parameter, optimizer group)` in the order of registration; group None: not trained.

    The optimizer must hold parameters of this model only.
    """
    if not isinstance(optimizer, Optimizer):
        raise ModelError("optimizer", type(optimizer).__name__, "give one of torch.optim, or a subclass")
    names = parameter_names(model)
    groups: dict[torch.Tensor, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ModelError(
                    "optimizer",
                    type(optimizer).__name__,
                    f"it holds a parameter of shape {tuple(parameter.shape)} that is not the model's; "
                    "make it from model.parameters()",
                )
            groups[parameter] = number
    if not groups:
        raise ModelError("optimizer", type(optimizer).__name__, "it holds no parameters; give it some to train")
    return [
        (name, parameter, groups.get(parameter))
        for name, parameter in own_state(model).named_parameters()
        if not hasattr(parameter, "on_servers")  # a table that servers hold
    ]


def group_sizes(optimizer: Optimizer) -> list[int]:
    """How many parameters each of its groups has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def refuse_added_parameters(optimizer: Optimizer, sizes: list[int]) -> None:
    """Its groups must be as large as they were when training began: a new parameter has no place where owners look."""
    if (now := group_sizes(optimizer)) != sizes:
        raise ModelError(
            "optimizer",
            f"{type(optimizer).__name__} with {sum(now)} parameters",
            f"it had {sum(sizes)} when training began, and owners know no others; give it all of them at the start, "
            "those to be trained later with requires_grad=False",
        )


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Every buffer a forward may change, counters included."""
    return list(own_state(model).buffers())


def _moved(tensor: torch.Tensor, to: torch.device | None) -> torch.Tensor:
    return tensor.detach() if to is None else tensor.detach().to(to, copy=True)


def copied(
    model: nn.Module, optimizer: Optimizer, flag: str, *, to: torch.device | None = None
) -> tuple[nn.Module, Optimizer]:
    """The same once more, on the same parameters: a client of servers gives them other memory. `flag` asks for that.
    With `to`, all of it on that device, in memory of its own."""
    same: dict[int, torch.Tensor] = {
        id(parameter): nn.Parameter(_moved(parameter, to), requires_grad=parameter.requires_grad)
        for parameter in own_state(model).parameters()
    }
    if to is not None:
        held = (value for state in optimizer.state.values() for value in state.values())
        same |= {
            id(tensor): _moved(tensor, to)
            for tensor in (*own_state(model).buffers(), *held)
            if isinstance(tensor, torch.Tensor)
        }
    try:
        return copy.deepcopy((model, optimizer), dict[int, Any](same))
    except Exception as error:
        raise ModelError(
            "model",
            type(model).__name__,
            f"it cannot be copied ({error}); let copy.deepcopy work, or leave out {flag}",
        ) from error


@contextmanager
def lent(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the parameters and buffers of these names have these values; afterwards their own again."""
    named = [*own_state(model).named_parameters(), *own_state(model).named_buffers()]
    own = [(tensor, tensor.data) for _, tensor in named]
    for name, tensor in named:
        if name in values:
            tensor.data = values[name]
    try:
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model is in eval mode; afterwards each module is in its own mode again."""
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Inside, the model is in train or eval mode; afterwards each module is in its own mode again.

    What the user has frozen with `.eval()` in a model that trains stays frozen, inside and afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    if not (training and model.training):
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what a forward changes: buffers and random numbers."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        for buffer, before in buffers:
            buffer.data.copy_(before)  # unnoticed by a backward that is yet to come
