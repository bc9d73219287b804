"""What the sweep runs.

Architectures of torchvision, timm and transformers, one entry each, and how torchvision's and timm's are
built.

An entry is a name "source:family:model". `entries` lists them without building anything; `build` gives the
model with random weights and a function that makes inputs of any batch size.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from sweep_building import Inputs, NotBuilt, images, settled
from sweep_transformers import base_models, task_models
from sweep_transformers import build as build_transformers

#: The smallest model of each family of torchvision, by name of the family.
TORCHVISION = {
    "alexnet": "alexnet",
    "convnext": "convnext_tiny",
    "densenet": "densenet121",
    "efficientnet": "efficientnet_b0",
    "efficientnet_v2": "efficientnet_v2_s",
    "googlenet": "googlenet",
    "inception": "inception_v3",
    "maxvit": "maxvit_t",
    "mnasnet": "mnasnet0_5",
    "mobilenet_v2": "mobilenet_v2",
    "mobilenet_v3": "mobilenet_v3_small",
    "regnet_x": "regnet_x_400mf",
    "regnet_y": "regnet_y_400mf",
    "resnet": "resnet18",
    "resnet_bottleneck": "resnet50",
    "resnext": "resnext50_32x4d",
    "shufflenet_v2": "shufflenet_v2_x0_5",
    "squeezenet": "squeezenet1_1",
    "swin": "swin_t",
    "swin_v2": "swin_v2_t",
    "vgg": "vgg11",
    "vgg_bn": "vgg11_bn",
    "vit": "vit_b_32",
    "wide_resnet": "wide_resnet50_2",
    "deeplabv3": "deeplabv3_mobilenet_v3_large",
    "fcn": "fcn_resnet50",
    "lraspp": "lraspp_mobilenet_v3_large",
    "fasterrcnn": "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fcos": "fcos_resnet50_fpn",
    "keypointrcnn": "keypointrcnn_resnet50_fpn",
    "maskrcnn": "maskrcnn_resnet50_fpn",
    "retinanet": "retinanet_resnet50_fpn",
    "ssd": "ssd300_vgg16",
    "ssdlite": "ssdlite320_mobilenet_v3_large",
    "mc3": "mc3_18",
    "mvit_v1": "mvit_v1_b",
    "mvit_v2": "mvit_v2_s",
    "r2plus1d": "r2plus1d_18",
    "r3d": "r3d_18",
    "s3d": "s3d",
    "swin3d": "swin3d_t",
}
_DETECTION = ("fasterrcnn", "fcos", "keypointrcnn", "maskrcnn", "retinanet", "ssd", "ssdlite")
_VIDEO = {
    "mc3": (8, 56),
    "r2plus1d": (8, 56),
    "r3d": (8, 56),
    "s3d": (16, 64),
    "swin3d": (4, 64),
    "mvit_v1": (16, 224),
    "mvit_v2": (16, 224),
}
_IMAGE = {"inception": 96, "maxvit": 224}  # the others take 64 pixels

#: A small model of each file of timm.models, by number of parameters.
TIMM = {
    "beit": "beit_base_patch16_224",
    "byoanet": "halonet_h1",
    "byobnet": "test_byobnet",
    "cait": "cait_xxs24_224",
    "coat": "coat_tiny",
    "convit": "convit_tiny",
    "convmixer": "convmixer_768_32",
    "convnext": "test_convnext",
    "cpubone": "cpubone_nano",
    "crossvit": "crossvit_tiny_240",
    "csatv2": "csatv2",
    "cspnet": "cs3darknet_focus_s",
    "cspnext": "cspnext_tiny",
    "davit": "davit_tiny",
    "deit": "deit_tiny_patch16_224",
    "densenet": "densenet121",
    "dla": "dla46x_c",
    "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small",
    "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0",
    "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1",
    "efficientvit_mit": "efficientvit_b0",
    "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb",
    "fasternet": "fasternet_t0",
    "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf",
    "gcvit": "gcvit_xxtiny",
    "ghostnet": "ghostnet_050",
    "hardcorenas": "hardcorenas_b",
    "hgnet": "hgnetv2_b0",
    "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny",
    "hrnet": "hrnet_w18_small",
    "iformer": "iformer_t",
    "inception_next": "inception_next_atto",
    "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3",
    "inception_v4": "inception_v4",
    "lcnetv2": "lcnetv2_small",
    "levit": "levit_384_s8",
    "lowformer": "lowformer_b0",
    "mambaout": "test_mambaout",
    "maxxvit": "test_coatnet",
    "metaformer": "poolformerv2_s12",
    "mlp_mixer": "mixer_s16_224",
    "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base",
    "mobilevit": "mobilevit_xxs",
    "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_siglip",
    "nasnet": "nasnetalarge",
    "nest": "nest_tiny",
    "nextvit": "nextvit_small",
    "nfnet": "test_nfnet",
    "pit": "pit_ti_224",
    "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0",
    "qwen3_vit": "qwen3_vit_88m",
    "rdnet": "rdnet_tiny",
    "regnet": "regnetx_002",
    "repghost": "repghostnet_050",
    "repvit": "repvit_m1",
    "res2net": "res2next50",
    "resnest": "resnest14d",
    "resnet": "test_resnet",
    "resnetv2": "resnetv2_18",
    "rexnet": "rexnet_100",
    "selecsls": "selecsls42",
    "senet": "legacy_seresnet18",
    "sequencer": "sequencer2d_s",
    "shvit": "shvit_s1",
    "sknet": "skresnet18",
    "starnet": "starnet_s050",
    "swiftformer": "swiftformer_xs",
    "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256",
    "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224",
    "tnt": "tnt_s_legacy_patch16_224",
    "tresnet": "tresnet_m",
    "twins": "twins_svt_small",
    "visformer": "visformer_tiny",
    "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
    "vision_transformer_relpos": "test_vit_relpos",
    "vision_transformer_sam": "samvit_base_patch16_224",
    "vitamin": "vitamin_small_224",
    "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw",
    "xception": "legacy_xception",
    "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One architecture.

    Attributes:
        source: "torchvision", "timm" or "transformers".
        family: torchvision's family, timm's file, or transformers' model type.
        model: name of the model or of its class.
    """

    source: str
    family: str
    model: str

    @property
    def name(self) -> str:
        """The three as one word."""
        return f"{self.source}:{self.family}:{self.model}"


def entries() -> list[Entry]:
    """All of them; the three sources take turns, and a part of the list is a spread of families."""
    first = [
        [Entry("torchvision", family, model) for family, model in TORCHVISION.items()],
        _shuffled([Entry("timm", family, model) for family, model in TIMM.items()]),
        _shuffled([Entry("transformers", family, model) for family, model in base_models()]),
    ]
    rest = _shuffled([Entry("transformers", family, model) for family, model in task_models()])
    return [*_in_turns(first), *rest]


def _shuffled(found: list[Entry]) -> list[Entry]:
    """In an order that is the same everywhere and has nothing to do with the alphabet."""
    return sorted(found, key=lambda entry: hashlib.sha256(entry.name.encode()).hexdigest())


def _in_turns(lists: list[list[Entry]]) -> list[Entry]:
    """Each list's entries spread evenly over the whole."""
    ranked = [((i + 0.5) / len(part), entry) for part in lists for i, entry in enumerate(part)]
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def build(entry: Entry) -> tuple[torch.nn.Module, Inputs, str]:
    """Return the model in eval mode, its inputs, and how small it was made.

    Raises:
        NotBuilt: it can't be made small enough, or its inputs are not known.
    """
    torch.manual_seed(0)
    match entry.source:
        case "torchvision":
            return _torchvision(entry)
        case "timm":
            return _timm(entry.model)
        case _:
            return build_transformers(entry.model, entry.family)


def _torchvision(entry: Entry) -> tuple[torch.nn.Module, Inputs, str]:
    import torchvision

    if entry.family in _DETECTION:
        model = torchvision.models.get_model(entry.model, weights=None, weights_backbone=None, num_classes=5)
        return settled(model), lambda batch: ([torch.rand(3, 96, 96) for _ in range(batch)],), "96 pixels"
    if entry.family in _VIDEO:
        frames, size = _VIDEO[entry.family]
        model = torchvision.models.get_model(entry.model, weights=None)
        return (
            settled(model),
            lambda batch: torch.randn(batch, 3, frames, size, size),
            f"{frames} frames of {size} pixels",
        )
    options: dict[str, Any] = {"image_size": 64} if entry.family == "vit" else {}
    if entry.family in ("deeplabv3", "fcn", "lraspp"):
        options["weights_backbone"] = None
    if entry.family in ("googlenet", "inception"):
        options["init_weights"] = True
    size = _IMAGE.get(entry.family, 64)
    return (
        settled(torchvision.models.get_model(entry.model, weights=None, **options)),
        images(size),
        f"{size} pixels",
    )


def _timm(name: str) -> tuple[torch.nn.Module, Inputs, str]:
    import timm

    reason = ""
    default = max(timm.get_pretrained_cfg(name).input_size[1:])
    for size in sorted({64, 96, 128, default}):
        for options in ({}, {"img_size": size}):
            try:
                model = settled(timm.create_model(name, pretrained=False, **options))
                make = images(size, timm.get_pretrained_cfg(name).input_size[0])
                with torch.no_grad():
                    model(make(2))
            except Exception as error:  # each model says in its own way that the size does not fit
                reason = f"{type(error).__name__}: {error}"
                continue
            return model, make, f"{size} pixels"
    raise NotBuilt(reason)
