"""Models of the benchmarks.

Real architectures, built from configurations with random weights, as far as speed does not depend on them.
"""

from __future__ import annotations

from typing import Any

import torch


def build(name: str, batch: int = 1) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a model in eval mode and keyword inputs for a batch: images 224 x 224, or 128 tokens."""
    import transformers as hf

    torch.manual_seed(0)
    ids = {
        "input_ids": torch.randint(0, 1000, (batch, 128)),
        "attention_mask": torch.ones(batch, 128, dtype=torch.long),
    }
    image = torch.randn(batch, 3, 224, 224)
    match name:
        case "hf-resnet50":
            return _settled(hf.ResNetModel(hf.ResNetConfig()), image), {"pixel_values": image}
        case "bert-base":
            return hf.BertModel(hf.BertConfig()).eval(), ids
        case "minilm":
            config = hf.BertConfig(
                hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
            )
            return hf.BertModel(config).eval(), ids
        case "hf-mobilenet_v2":
            return _settled(hf.MobileNetV2Model(hf.MobileNetV2Config()), image), {"pixel_values": image}
        case "hf-vit-b16":
            return hf.ViTModel(hf.ViTConfig()).eval(), {"pixel_values": image}
        case "hf-efficientnet_b0":
            config = hf.EfficientNetConfig(
                image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280
            )
            return _settled(hf.EfficientNetModel(config), image), {"pixel_values": image}
        case "hf-convnext_tiny":
            return hf.ConvNextModel(hf.ConvNextConfig()).eval(), {"pixel_values": image}
        case _:
            import torchvision

            return torchvision.models.get_model(name.removeprefix("tv-"), weights=None).eval(), {"x": image}


def _settled(model: torch.nn.Module, image: torch.Tensor) -> torch.nn.Module:
    """Return the model with batch norms as training leaves them: they normalize, and no bias is 0.

    Their statistics are those of an image.

    As transformers initializes them, biases are 0, and OpenVINO computes none, which no trained network
    allows. Factors of about 0.02 let EfficientNet compute numbers below 1e-38, with which Intel CPUs take 100
    times as long.
    """
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        for norm in norms:
            norm.weight.fill_(1.0)
            norm.bias.normal_(std=0.1)
        model.train()(image)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


NAMES = (
    "hf-resnet50",
    "tv-resnet50",
    "bert-base",
    "minilm",
    "tv-resnet18",
    "tv-mobilenet_v2",
    "tv-efficientnet_b0",
    "tv-vit_b_16",
    "hf-vit-b16",
    "hf-mobilenet_v2",
    "hf-efficientnet_b0",
    "hf-convnext_tiny",
)
