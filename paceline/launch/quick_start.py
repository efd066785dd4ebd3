"""A second less to wait for each process: torch's compiler is loaded by those who use it.

The first optimizer that is made loads `torch._dynamo`, a thousand modules, only to tell it to keep out of
`Optimizer.add_param_group` and a few other methods; and so does the first `step`. As long as nobody else has loaded
it, it does keep out. So the optimizers go without it until somebody has; from then on they are torch's own again.

This is left alone on a torch that we do not know, and with `PACELINE_PLAIN_TORCH=1` (`torch_private.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from paceline.launch.on_import import when_imported
from paceline.torch_private import COMPILER, KNOWN_TO_COMPILER, STEP_DECORATOR, may_borrow

Method = Callable[..., Any]

OPTIMIZERS = "torch.optim.optimizer"


def load_compiler_late() -> None:
    """To be called before torch is imported, which is left to the script: it may set torch's variables first."""
    when_imported(OPTIMIZERS, _go_without_compiler)


def _go_without_compiler(module: ModuleType) -> None:
    if not may_borrow(sys.modules["torch"].__version__) or not hasattr(module, STEP_DECORATOR):
        return
    for method in vars(module.Optimizer).values():
        if (function := getattr(method, "__wrapped__", None)) is not None:
            setattr(function, KNOWN_TO_COMPILER, _without_compiler(method, function))
    setattr(module, STEP_DECORATOR, _steps_without_compiler(getattr(module, STEP_DECORATOR)))


def _without_compiler(method: Method, function: Method) -> Method:
    """`function`, until there is a compiler that `method` can tell of it."""

    def call(*arguments: Any, **options: Any) -> Any:
        if COMPILER not in sys.modules:
            return function(*arguments, **options)
        if getattr(function, KNOWN_TO_COMPILER, None) is call:
            delattr(function, KNOWN_TO_COMPILER)
        return method(*arguments, **options)

    return call


def _steps_without_compiler(decorate: Callable[[Method], Method]) -> Callable[[Method], Method]:
    def decorated(function: Method) -> Method:
        with_compiler = decorate(function)

        @functools.wraps(function)
        def step(self: Any, *arguments: Any, **options: Any) -> Any:
            if COMPILER in sys.modules:
                return with_compiler(self, *arguments, **options)
            import torch

            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return function(self, *arguments, **options)

        return step

    return decorated
