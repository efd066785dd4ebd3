"""Models of language, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from case import Case, adamw, own_loss, samples, whole_numbers
from torch import nn

import paceline as pl

WORDS, LENGTH, WIDTH = 120, 16, 32
IGNORED = -100  # as a label


def _case(model: nn.Module, data: Any) -> Case:
    return Case(model, adamw(model), own_loss, data)


def _text() -> Any:
    """Blocks of text without padding, each word to be told from those before it."""
    words = whole_numbers(WORDS, LENGTH)
    return samples(input_ids=words, labels=words)


def _padding() -> torch.Tensor:
    """1 for every word, 0 behind the end of a sentence. The first one is as long as can be."""
    lengths = whole_numbers(LENGTH // 2, seed=9) + LENGTH // 2 + 1
    lengths[0] = LENGTH
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def gpt2() -> Case:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return _case(transformers.GPT2LMHeadModel(config), _text())


def _llama_like() -> dict[str, int]:
    return {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }


def llama() -> Case:
    return _case(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_llama_like())), _text())


def mixtral() -> Case:
    config = transformers.MixtralConfig(**_llama_like(), num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the default one has no kernel for float64
    model = transformers.MixtralForCausalLM(config)
    for layer in model.model.layers:
        pl.whole(layer.mlp.experts)  # who gets which word follows from values
    return _case(model, _text())


def bert() -> Case:
    """Masked words to be told, as many in every sentence: then the mean over words is one over sentences."""
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * WIDTH
    )
    words = whole_numbers(WORDS, LENGTH)
    masked = torch.arange(LENGTH) % 5 == 2
    return _case(
        transformers.BertForMaskedLM(config),
        samples(
            input_ids=torch.where(masked, 3, words),
            attention_mask=_padding() | masked.long(),
            labels=torch.where(masked, words, IGNORED),
        ),
    )


def distilbert() -> Case:
    """Sentences of different lengths, to be told apart."""
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=2 * WIDTH, max_position_embeddings=LENGTH
    )
    return _case(
        transformers.DistilBertForSequenceClassification(config),
        samples(input_ids=whole_numbers(WORDS, LENGTH), attention_mask=_padding(), labels=whole_numbers(2)),
    )


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    words = whole_numbers(WORDS, LENGTH)
    return _case(
        transformers.T5ForConditionalGeneration(config),
        samples(input_ids=words, attention_mask=_padding(), labels=whole_numbers(WORDS, LENGTH // 2, seed=10)),
    )


def mamba() -> Case:
    config = transformers.MambaConfig(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, state_size=4)
    return _case(transformers.MambaForCausalLM(config), _text())
