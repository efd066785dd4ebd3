"""Models of speech, of `transformers`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from case import Case, adamw, numbers, own_loss, samples, whole_numbers
from torch import nn

import paceline as pl

WORDS, WIDTH = 60, 32


def whisper() -> Case:
    frames, bands = 32, 16
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=bands,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=frames // 2,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    for coder in (model.model.encoder, model.model.decoder):
        pl.whole(coder)  # each draws a number for every layer, and leaves it out or not
    data = samples(input_features=numbers(bands, frames), labels=whole_numbers(WORDS, 8))
    return Case(model, adamw(model), own_loss, data)


def wav2vec2() -> Case:
    """Letters of a recording; nothing is masked in the sound. The loss is written out: that of the model looks at the
    labels before anything else, and raises an error or goes on."""
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        conv_dim=(WIDTH, WIDTH, WIDTH),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        pad_token_id=0,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    pl.whole(model.wav2vec2.encoder)  # it draws a number for every layer, and leaves it out or not

    @pl.whole  # torch.export cannot follow it
    def of_letters(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        lengths = (torch.full((scores.size(1),), count) for count in (scores.size(0), labels.size(1)))
        return F.ctc_loss(scores, labels, *lengths)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = model(batch["input_values"]).logits.log_softmax(-1)
        return of_letters(scores.transpose(0, 1), batch["labels"])

    data = samples(input_values=numbers(640), labels=whole_numbers(WORDS - 1, 6) + 1)
    return Case(model, adamw(model), loss, data)
