"""The graph of a model's forward, down to operators that have rules, and what each of them gives as shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from paceline.split.cut import Example
from paceline.split.trace import Traced, trace
from paceline.split.transformer_stacks import stack_of
from paceline.torch_private import tree_flatten


def follow(model: nn.Module, forward: Callable[..., Any], example: Example, *, grad: bool) -> Traced:
    """Returns the operations of the model, called so, in the mode it is in."""
    leaves, spec = tree_flatten(example)
    return trace(model, forward, leaves, spec, grad=grad, plain=_plain)


def _plain(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what a module does as something that can be followed; None if it is an operation as a whole."""
    if type(module) is nn.TransformerEncoderLayer:
        return partial(_encoder_layer, module)
    return stack_of(module)


def _encoder_layer(
    layer: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    """Does what torch's layer does when it takes no short cut."""

    def attend(x: Any) -> Any:
        found = layer.self_attn(
            x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, need_weights=False, is_causal=is_causal
        )
        return layer.dropout1(found[0])

    def feed(x: Any) -> Any:
        return layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(x)))))

    if layer.norm_first:
        src = src + attend(layer.norm1(src))
        return src + feed(layer.norm2(src))
    src = layer.norm1(src + attend(src))
    return layer.norm2(src + feed(src))


def on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of the model that has shapes and no values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


class Shapes(fx.Interpreter):
    """Finds out what every node of a graph gives, as tensors without values (numbers are what they are)."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(model, graph))
        self.found: dict[str, Any] = {}

    def of(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Returns that by name of the node, for inputs like these."""
        # What the forward makes has no values either; and it may switch gradients on and off.
        with torch.no_grad(), torch.device("meta"):
            self.run(*(torch.empty_like(tensor, device="meta") for tensor in tensors))
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        self.found[n.name] = result = super().run_node(n)
        return result
