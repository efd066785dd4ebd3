"""Models of speech, of `transformers`."""

from __future__ import annotations

import transformers
from case import Case, adamw, numbers, own_loss, samples, whole_numbers

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
    data = samples(input_features=numbers(bands, frames), labels=whole_numbers(WORDS, 8))
    return Case(model, adamw(model), own_loss, data)


def wav2vec2() -> Case:
    """Letters of a recording. The loss is told to be a mean, it is a sum by default; nothing is masked in the sound."""
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
        ctc_loss_reduction="mean",
        apply_spec_augment=False,
        pad_token_id=0,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    data = samples(input_values=numbers(640), labels=whole_numbers(WORDS - 1, 6) + 1)
    return Case(model, adamw(model), own_loss, data)
