"""The graph of a model's forward, for one way of calling it: torch.fx down to torch's own modules.

What a call's tensors are become placeholders, everything else about it is fixed: another kind of call is traced anew.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from paceline.errors import ModelError
from paceline.split.cut import Example


class Call:
    """One way of calling a model: where the tensors are, and all that is not a tensor."""

    def __init__(self, example: Example, training: bool) -> None:
        leaves, self.structure = pytree.tree_flatten(example)
        self.is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        self.fixed = tuple(None if tensor else leaf for leaf, tensor in zip(leaves, self.is_tensor, strict=True))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.training = training

    @property
    def key(self) -> tuple[Any, ...]:
        kinds = tuple((tensor.dim(), tensor.dtype) for tensor in self.tensors)
        return (self.training, str(self.structure), self.is_tensor, repr(self.fixed), kinds)

    def arguments(self, tensors: list[Any]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if tensor else fix for fix, tensor in zip(self.fixed, self.is_tensor, strict=True)]
        return pytree.tree_unflatten(leaves, self.structure)


class _Tracer(fx.Tracer):
    def __init__(self, call: Call, opaque: set[str]) -> None:
        super().__init__()
        self._call = call
        self._opaque = opaque  # names of modules that cannot be looked into
        self.inside: list[str] = []

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        if isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            return name in self._opaque
        return name in self._opaque or super().is_leaf_module(module, name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        inputs = [self.create_proxy("placeholder", f"input_{k}", (), {}) for k in range(len(self._call.tensors))]

        def flat(root: nn.Module, *tensors: Any) -> Any:
            args, kwargs = self._call.arguments(list(tensors))
            return root_fn(root, *args, **kwargs)

        return flat, [self.root, *inputs]

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """`for part in x.chunk(3)`: how many there are is known."""
        node = obj.node
        if node.target in ("chunk", torch.chunk):
            count = node.args[1] if len(node.args) > 1 else node.kwargs["chunks"]
            if isinstance(count, int):
                return iter([obj[number] for number in range(count)])
        return super().iter(obj)

    def call_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(module)
        self.inside.append(name)
        result = super().call_module(module, forward, args, kwargs)
        self.inside.pop()  # not after a failure: the innermost one that fails is the one to name
        return result


def trace(model: nn.Module, call: Call) -> fx.Graph:
    """The graph of `model`, called so. A user's own module that cannot be traced is one node."""
    opaque: set[str] = set()
    was = {module: module.training for module in model.modules()}
    while True:
        tracer = _Tracer(call, opaque)
        model.train(call.training)
        try:
            with _plain_forwards(model):
                return tracer.trace(model)
        except Exception as error:
            if not tracer.inside:
                raise ModelError(
                    "model",
                    type(model).__name__,
                    f"its forward cannot be traced ({str(error).splitlines()[0][:160]}), move what depends on values "
                    "into a module of its own",
                ) from error
            opaque.add(tracer.inside[-1])
        finally:
            for module, training in was.items():
                module.training = training


@contextlib.contextmanager
def _plain_forwards(model: nn.Module) -> Iterator[None]:
    """torch's encoder looks at values to choose fast paths; for tracing it takes the plain way."""
    changed = [m for m in model.modules() if isinstance(m, (nn.TransformerEncoder, nn.TransformerEncoderLayer))]
    for module in changed:
        plain = _encoder if isinstance(module, nn.TransformerEncoder) else _encoder_layer
        module.forward = plain.__get__(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _encoder(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    for layer in self.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
    return self.norm(src) if self.norm is not None else src


def _encoder_layer(
    self: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    def attend(x: Any) -> Any:
        found = self.self_attn(
            x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, need_weights=False, is_causal=is_causal
        )
        return self.dropout1(found[0])

    def feed(x: Any) -> Any:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    if self.norm_first:
        src = src + attend(self.norm1(src))
        return src + feed(self.norm2(src))
    src = self.norm1(src + attend(src))
    return self.norm2(src + feed(src))


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model that has shapes and no values."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    forward = model.__dict__.pop("forward", None)
    try:
        return copy.deepcopy(model, memo)
    finally:
        if forward is not None:
            model.forward = forward


class Shapes(fx.Interpreter):
    """What every node of a graph gives, as tensors without values (numbers are what they are)."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(model, graph))
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n.name] = result = super().run_node(n)
        return result
