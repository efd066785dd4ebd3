"""`nn.MultiheadAttention` with its four projections in int8. Attention itself, products of what it has just computed,
stays in float."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.quantize.int8_layer import Int8Layer, Tensors
from paceline.quantize.int8_linear import Int8Linear
from paceline.quantize.rounding import InputRange, Int8Weight

_OF_THREE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class Int8Attention(Int8Layer):
    """Attention over batches: what `nn.MultiheadAttention` takes and returns."""

    kind = "attention"
    inputs = 4  # query, key, value, and what attention has made of them

    def __init__(
        self,
        weights: Mapping[str, Int8Weight],
        floats: Tensors,
        ranges: Sequence[InputRange],
        heads: int,
        batch_first: bool,
    ) -> None:
        super().__init__(weights, floats, ranges)
        self.num_heads, self.batch_first = heads, batch_first
        # What torch's encoder looks at before it computes by itself with weights in float: here it has to ask.
        self.in_proj_bias, self._qkv_same_embed_dim = None, False
        out = self.weights["out_proj.weight"]
        self.embed_dim = width = len(out.values)
        if (together := self.weights.get("in_proj_weight")) is not None:
            three = [together.rows(start, start + width) for start in (0, width, 2 * width)]
        else:
            three = [self.weights[name] for name in _OF_THREE]
        bias = self.floats.get("in_proj_bias")
        biases = [None] * 3 if bias is None else list(bias.chunk(3))
        self.projections = nn.ModuleList(
            Int8Linear({"weight": part}, {} if its is None else {"bias": its}, ranges[at : at + 1])
            for at, (part, its) in enumerate(zip(three, biases, strict=True))
        )
        self.together = None
        if together is not None:
            self.together = Int8Linear({"weight": together}, {} if bias is None else {"bias": bias}, ranges[:1])
        out_bias = self.floats.get("out_proj.bias")
        self.out = Int8Linear({"weight": out}, {} if out_bias is None else {"bias": out_bias}, ranges[3:])

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        given: Any = module
        if given.bias_k is not None or given.bias_v is not None or given.add_zero_attn:
            return "it adds keys of its own (add_bias_kv or add_zero_attn)"
        return None

    @staticmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        given: Any = module
        names = _OF_THREE if given.in_proj_weight is None else ("in_proj_weight",)
        weights = {name: getattr(given, name).detach() for name in names}
        weights["out_proj.weight"] = given.out_proj.weight.detach()
        floats = {"in_proj_bias": given.in_proj_bias, "out_proj.bias": given.out_proj.bias}
        return weights, {name: tensor.detach() for name, tensor in floats.items() if tensor is not None}

    @classmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        given: Any = module
        return cls(weights, floats, ranges, given.num_heads, given.batch_first)

    def begin_look(self) -> None:
        super().begin_look()
        assert self.looks is not None
        for look, layer in zip(self.looks, (*self.projections, self.out), strict=True):
            layer.looks = (look,)

    def end_look(self, *, dynamic: bool) -> str | None:
        if (problem := super().end_look(dynamic=dynamic)) is not None:
            return problem
        for at, layer in enumerate((*self.projections, self.out)):
            layer.looks, layer.ranges = None, self.ranges[at : at + 1]
        if self.together is not None:
            self.together.ranges = self.ranges[:1]
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`is_causal` says only of which form the mask is, as there."""
        if query.dim() == 2:  # no batch
            padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            batch = 0 if self.batch_first else 1
            same = query is key and key is value
            query = query.unsqueeze(batch)
            key, value = (query, query) if same else (key.unsqueeze(batch), value.unsqueeze(batch))
            found, weights = self.forward(query, key, value, padding, need_weights, attn_mask, average_attn_weights)
            return found.squeeze(batch), None if weights is None else weights.squeeze(0)
        projected = self._projected(query, key, value)
        if not self.batch_first:
            projected = [part.transpose(0, 1) for part in projected]
        queries, keys, values = (
            part.reshape(*part.shape[:2], self.num_heads, -1).transpose(1, 2) for part in projected
        )
        mask = _merged(attn_mask, key_padding_mask, len(queries), self.num_heads, queries.dtype)
        weights = None
        if need_weights:
            scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            context = weights @ values
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        context = context.transpose(1, 2).flatten(-2)
        return self.out(context if self.batch_first else context.transpose(0, 1)), weights

    def _projected(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        if query is key and key is value and self.together is not None and self.looks is None:
            return list(self.together(query).chunk(3, -1))
        return [part(it) for part, it in zip(self.projections, (query, key, value), strict=True)]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, int8"


def _merged(
    mask: torch.Tensor | None, padding: torch.Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Returns what is added to the scores of batch × heads × queries × keys."""
    found = None
    if mask is not None:
        found = _added(mask, dtype)
        found = found.reshape(batch, heads, *found.shape[1:]) if found.dim() == 3 else found
    if padding is not None:
        of_keys = _added(padding, dtype)[:, None, None, :]
        found = of_keys if found is None else found + of_keys
    return found


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask as numbers to add: -inf where one of truths is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
