"""Stacks of layers in torch.nn whose own forward cannot be followed, as the plain loops that they are.

Their forwards look at masks and shapes to choose a faster kernel; the layers give the same values without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


def stack_of(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what `module` does as something that can be followed; None for any other module."""
    found = _STACKS.get(type(module))
    return partial(found, module) if found is not None else None


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns what the module is called with, by name, defaults included."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    _, *given = bound.arguments.items()
    return dict(given)


def _encoder(encoder: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Any:
    given = _arguments(encoder, args, kwargs)
    src, mask, causal = given.pop("src"), given.pop("mask"), bool(given.pop("is_causal"))
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, is_causal=causal, **given)
    return encoder.norm(src) if encoder.norm is not None else src


def _decoder(decoder: nn.TransformerDecoder, *args: Any, **kwargs: Any) -> Any:
    given = _arguments(decoder, args, kwargs)
    tgt, memory, causal = given.pop("tgt"), given.pop("memory"), bool(given.pop("tgt_is_causal"))
    for layer in decoder.layers:
        tgt = layer(tgt, memory, tgt_is_causal=causal, **given)
    return decoder.norm(tgt) if decoder.norm is not None else tgt


def _transformer(transformer: nn.Transformer, *args: Any, **kwargs: Any) -> Any:
    given = _arguments(transformer, args, kwargs)
    src, mask, padding = given.pop("src"), given.pop("src_mask"), given.pop("src_key_padding_mask")
    causal = given.pop("src_is_causal")
    memory = transformer.encoder(src, mask=mask, src_key_padding_mask=padding, is_causal=causal)
    return transformer.decoder(given.pop("tgt"), memory, **given)


_STACKS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
