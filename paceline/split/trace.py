"""A model's forward as a list of operations, by torch.fx.

Modules of torch.nn are operations as a whole, and so is any submodule of the user's whose forward cannot be followed:
one that decides by the values of a tensor, say. Only the model's own forward has to be one that can.

What torch.fx would note down wrongly without a word is seen to here: random numbers and zeros made in a forward (they
would become constants), `torch.no_grad` around a part of it, flags such as `self.training` (a trace is good for one
mode), arguments that are not tensors and conditions on shapes (a trace is good for the same ones).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from paceline.errors import ModelError
from paceline.split.transformer_stacks import stack_of
from paceline.torch_private import TreeSpec, has_hooks, is_compiled, set_grad_mode, tree_unflatten

_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_ABOUT_SHAPES = ("size", "dim", "ndimension", "numel", "is_floating_point", "element_size", "stride")
_SHAPES = ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")
Plain = Callable[[nn.Module], Callable[..., Any] | None]
_TRACING = threading.Lock()  # torch.fx changes nn.Module itself meanwhile


@dataclass
class Traced:
    """The operations of one way to call the model: in one mode, with the same arguments but for tensors."""

    graph: fx.Graph
    training: bool
    grad: bool
    spec: TreeSpec  # of (args, kwargs)
    constants: list[Any]  # by leaf: what is not a tensor
    conditions: list[tuple[fx.Node, bool]]  # on shapes, and how they came out
    whole: dict[str, str] = field(default_factory=dict)  # submodules that could not be followed, and why

    @property
    def nodes(self) -> list[fx.Node]:
        """Returns the operations; what is only a name for an input or a parameter is none."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]

    @property
    def inputs(self) -> list[fx.Node]:
        """Returns the nodes of the inputs, by leaf of the call, tensors only."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> Any:
        """Returns what the forward returns, with nodes in the place of values."""
        (node,) = (node for node in self.graph.nodes if node.op == "output")
        return node.args[0]

    def fits(self, model: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> bool:
        """Returns whether a call of the model with these would do the same operations."""
        if (self.training, self.grad) != (model.training, torch.is_grad_enabled()) or spec != self.spec:
            return False
        if not all(_alike(leaf, constant) for leaf, constant in zip(leaves, self.constants, strict=True)):
            return False
        if not self.conditions:
            return True
        given = dict(zip(self.inputs, tensors(leaves), strict=True))
        return all(_about_shapes(node, model, given) is value for node, value in self.conditions)


class _Tensor:
    """Stands for any tensor among the constants."""


def tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the leaves of a call."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _alike(leaf: Any, constant: Any) -> bool:
    """Returns whether an argument is what it was when the trace was made."""
    if constant is _Tensor:
        return isinstance(leaf, torch.Tensor)
    return leaf is constant or (type(leaf) is type(constant) and bool(leaf == constant))


def trace(
    model: nn.Module,
    forward: Callable[..., Any],
    leaves: Sequence[Any],
    spec: TreeSpec,
    *,
    grad: bool,
    plain: Plain = stack_of,
) -> Traced:
    """Returns the operations of the model. `forward` is its own, and it is called with `leaves`, put together by
    `spec`. `plain` says what modules of torch.nn do as something that can be followed; None: they are operations as
    a whole."""
    whole: dict[str, str] = {}
    while True:
        tracer = _Tracer(forward, leaves, spec, whole, plain)
        try:
            with _TRACING, torch.set_grad_enabled(grad), tracer.factories():
                graph = tracer.trace(model)
        except _Unfollowed as failure:
            # Others of its kind would fail as it did; what it lies in, or what lies in it, may not.
            modules = dict(model.named_modules())
            kind = type(modules[failure.name])
            for name, module in modules.items():
                related = f"{name}.".startswith(f"{failure.name}.") or f"{failure.name}.".startswith(f"{name}.")
                if name == failure.name or (type(module) is kind and not related):
                    whole[name] = failure.why
            continue
        except Exception as error:
            raise ModelError(
                "model",
                type(model).__name__,
                f"its own forward cannot be followed, so it cannot be cut ({_first_line(error)}); "
                "move what cannot into a submodule, which then is kept as a whole",
            ) from error
        constants = [_Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return Traced(graph, model.training, grad, spec, constants, tracer.conditions, whole)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class _Unfollowed(Exception):
    """Is raised where a submodule's forward cannot be followed."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name)
        self.name, self.why = name, why


class _Tracer(fx.Tracer):
    """Follows a forward; in comparison with torch.fx's own it also sees what would go unnoticed."""

    proxy_buffer_attributes = True  # else changes of a buffer would be made now, and not noted

    def __init__(
        self, forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec, whole: dict[str, str], plain: Plain
    ) -> None:
        super().__init__()
        self._plain = plain
        self._forward, self._leaves, self._spec, self._whole = forward, leaves, spec, whole
        self._thread = threading.get_ident()
        self._grad = self._grad_now = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")
        self._given: dict[fx.Node, Any] = {}
        self.conditions: list[tuple[fx.Node, bool]] = []

    # ── what is followed ─────────────────────────────────────────────────────────────────────────────────

    def create_args_for_root(self, fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        self._grad = self._grad_now = torch.is_grad_enabled()
        leaves = list(self._leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = self.create_proxy("placeholder", f"input_{index}", (), {})
                self._given[leaves[index].node] = leaf
        args, kwargs = tree_unflatten(leaves, self._spec)
        assert isinstance(self.root, nn.Module)
        forward = self._plain(self.root) or self._forward

        def call() -> Any:
            returned = forward(*args, **kwargs)
            self._follow_grad_mode()
            return returned

        return call, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._whole or is_compiled(m) or has_hooks(m):
            return True
        if self._plain(m) is not None:
            return False
        return any(kind.__module__.startswith("torch.") for kind in type(m).__mro__ if kind not in _CONTAINERS)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:  # of somebody who prepares data, say
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        try:
            return super().call_module(m, self._plain(m) or forward, args, kwargs)
        except _Unfollowed:
            raise
        except Exception as error:
            raise _Unfollowed(name, _first_line(error)) from error

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    @contextmanager
    def factories(self) -> Iterator[None]:
        """Makes tensors that are made in a forward anew at every call."""
        originals = {name: getattr(torch, name) for name in _FACTORIES}

        def noting(original: Any) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread or not hasattr(self, "graph"):
                    return original(*args, **kwargs)
                return self.create_proxy("call_function", original, args, kwargs)

            return make

        for name, original in originals.items():
            setattr(torch, name, noting(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(torch, name, original)

    # ── what would go unnoticed ──────────────────────────────────────────────────────────────────────────

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind != "output":
            self._follow_grad_mode()
        if torch.is_autocast_enabled("cpu") != self._autocast:
            raise TraceError("it switches autocast; put it into the loss, around the call of the model")
        node = super().create_node(kind, *args, **kwargs)
        node.meta["grad"] = self._grad_now == self._grad
        return node

    def _follow_grad_mode(self) -> None:
        """Notes as an operation that the forward has switched gradients on or off."""
        now = torch.is_grad_enabled()
        if now != self._grad_now:
            self._grad_now = now
            node = super().create_node("call_function", set_grad_mode, (now,), {})
            node.meta["grad"] = False  # neither begins nor ends a stage

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Lets `for part in x.chunk(3)` be followed: how many there are is known."""
        if obj.node.target in ("chunk", torch.chunk):
            count = obj.node.args[1] if len(obj.node.args) > 1 else obj.node.kwargs.get("chunks")
            if isinstance(count, int):
                return iter([operator.getitem(obj, number) for number in range(count)])
        return super().iter(obj)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Returns a condition's value, if it follows from shapes, and notes that it did."""
        assert isinstance(self.root, nn.Module)
        value = _about_shapes(obj.node, self.root, self._given)
        if not isinstance(value, bool):
            raise TraceError("it decides by the values of a tensor")
        self.conditions.append((obj.node, value))
        return value


def _about_shapes(node: Any, model: nn.Module, given: dict[fx.Node, Any]) -> Any:
    """Returns the value of a node that follows from the shapes of inputs and parameters alone."""
    if isinstance(node, (tuple, list)):
        return type(node)(_about_shapes(entry, model, given) for entry in node)
    if not isinstance(node, fx.Node):
        return node
    if node.op == "placeholder":
        return given[node]
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(model)
    about = node.op == "call_method" and node.target in _ABOUT_SHAPES
    about |= node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPES
    plain = node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"
    if about or plain:
        args = [_about_shapes(arg, model, given) for arg in node.args]
        kwargs = {name: _about_shapes(arg, model, given) for name, arg in node.kwargs.items()}
        if plain and not any(isinstance(arg, torch.Tensor) for arg in args):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if about and node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if about:
            return getattr(args[0], args[1])
    raise TraceError("it decides by the values of a tensor")
