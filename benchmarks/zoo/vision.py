"""Models of images, of `transformers`, `torchvision` and `timm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from case import Case, adamw, momentum, numbers, own_loss, samples, whole_numbers
from torch import nn

CLASSES, WIDTH = 10, 32


def _told_apart(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    image, label = batch
    return F.cross_entropy(model(image), label)


def _classes(model: nn.Module, size: int) -> Case:
    return Case(model, momentum(model), _told_apart, (numbers(3, size, size), whole_numbers(CLASSES)))


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────


def vit() -> Case:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    model = transformers.ViTForImageClassification(config)
    return Case(model, adamw(model), own_loss, samples(pixel_values=numbers(3, 32, 32), labels=whole_numbers(CLASSES)))


def clip() -> Case:
    """Its loss is over all pairs of a batch: parts of a batch have other pairs."""
    import transformers

    layers: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.CLIPConfig(
        text_config={**layers, "vocab_size": 60, "max_position_embeddings": 12, "bos_token_id": 0, "eos_token_id": 59},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch, return_loss=True).loss  # type: ignore[no-any-return]

    words = whole_numbers(59, 12)
    words[:, -1] = 59
    return Case(model, adamw(model), loss, samples(input_ids=words, pixel_values=numbers(3, 32, 32)))


# ── torchvision ──────────────────────────────────────────────────────────────────────────────────────────────


def resnet18() -> Case:
    from torchvision.models import resnet18

    return _classes(resnet18(num_classes=CLASSES), 64)


def densenet121() -> Case:
    from torchvision.models import DenseNet

    return _classes(DenseNet(8, (6, 12, 24, 16), num_init_features=16, num_classes=CLASSES), 64)


def mobilenet_v3() -> Case:
    from torchvision.models import mobilenet_v3_small

    return _classes(mobilenet_v3_small(num_classes=CLASSES), 64)


def vgg11() -> Case:
    """With channels and hidden layers of an eighth and less: its first linear layer has a hundred million weights."""
    from torchvision.models.vgg import VGG, make_layers

    layers: list[int | str] = [16, "M", 32, "M", 64, 64, "M", 64, 64, "M", 64, 64, "M"]
    with torch.device("meta"):
        model = VGG(make_layers(layers), CLASSES, init_weights=False)  # type: ignore[arg-type]
    hidden = nn.Sequential(
        nn.Linear(64 * 7 * 7, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout()
    )
    model.classifier = nn.Sequential(*hidden, nn.Linear(64, CLASSES))
    model.features.to_empty(device="cpu")
    for module in model.features:
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return _classes(model, 64)


def convnext() -> Case:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)]
    model = ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=CLASSES)
    return _classes(model, 64)


def deeplabv3() -> Case:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=CLASSES)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        image, labels = batch
        return F.cross_entropy(model(image)["out"], labels)

    return Case(model, momentum(model), loss, (numbers(3, 64, 64), whole_numbers(CLASSES, 64, 64)))


# ── timm ─────────────────────────────────────────────────────────────────────────────────────────────────────


def efficientnet_b0() -> Case:
    import timm

    return _classes(timm.create_model("efficientnet_b0", num_classes=CLASSES, drop_rate=0.2, drop_path_rate=0.2), 64)


def swin() -> Case:
    from timm.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        img_size=32, patch_size=2, num_classes=CLASSES, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4
    )
    return _classes(model, 32)
