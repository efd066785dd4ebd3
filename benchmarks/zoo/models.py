"""Which architectures are in the zoo, and what about them decides how they can be cut. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """An architecture: the file and function that make it, and what it is of."""

    name: str
    file: str
    made_by: str = ""  # the package it is from; empty: written here in plain torch
    images: bool = False
    recurrent: bool = False
    batchnorm: bool = False
    pairs: bool = False  # its loss is over all pairs of a batch, and that of a part is another one
    dropout: bool = True  # as it comes
    in_table: bool = True


def _listed() -> tuple[Model, ...]:
    return (
        Model("gpt2", "language", "transformers"),
        Model("llama", "language", "transformers", dropout=False),
        Model("mixtral", "language", "transformers", dropout=False),
        Model("bert", "language", "transformers"),
        Model("distilbert", "language", "transformers"),
        Model("t5", "language", "transformers"),
        Model("mamba", "language", "transformers", dropout=False),
        Model("whisper", "sound", "transformers", dropout=False),
        Model("wav2vec2", "sound", "transformers"),
        Model("vit", "vision", "transformers", images=True, dropout=False),
        Model("clip", "vision", "transformers", images=True, pairs=True, dropout=False),
        Model("resnet18", "vision", "torchvision", images=True, batchnorm=True, dropout=False),
        Model("densenet121", "vision", "torchvision", images=True, batchnorm=True, dropout=False),
        Model("mobilenet_v3", "vision", "torchvision", images=True, batchnorm=True),
        Model("vgg11", "vision", "torchvision", images=True),
        Model("convnext", "vision", "torchvision", images=True),
        Model("deeplabv3", "vision", "torchvision", images=True, batchnorm=True),
        Model("efficientnet_b0", "vision", "timm", images=True, batchnorm=True),
        Model("swin", "vision", "timm", images=True),
        Model("unet", "plain", images=True, batchnorm=True, dropout=False),
        Model("lstm_translator", "plain", recurrent=True),
        Model("dlrm", "plain", dropout=False),
        Model("graph_network", "plain"),
        Model("perceptron", "plain", in_table=False),  # for the test of the zoo itself
    )


MODELS = {model.name: model for model in _listed()}
