"""Models of the kinds that users found slower, or worse, in int8: small ones of each kind, built here.

MiniLM has its weights, all others have random ones: they show what the operators of a kind cost, not how well
a trained network answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from results_rows import Figure
from task import Batch, Run
from task_minilm import minilm
from torch import nn

#: What a case judges besides the error: how each tool computes it, given fp32 and the tool.
Judge = Callable[[Run, Run], Figure]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of model, as a task of peers.py.

    Attributes:
        name: on the command line and in rows.
        thread: where users reported it.
        model: in eval mode; its output is one tensor.
        calibration: keyword inputs, batch by batch.
        evaluation: others; the first one is timed.
        free: which dimensions of the inputs may have any size.
        asked: what `judge` says; "" where the error says all.
        judge: see `Judge`.
    """

    name: str
    thread: str
    model: nn.Module
    calibration: list[Batch]
    evaluation: list[Batch]
    free: tuple[int, ...] = (0,)
    asked: str = ""
    judge: Judge | None = None


class Only(nn.Module):
    """A model of transformers whose output is one tensor.

    Args:
        model: of transformers.
        name: of the tensor in its output; "" where it returns a tensor.
    """

    def __init__(self, model: nn.Module, name: str = "last_hidden_state") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        found = self.model(**inputs)
        return found[self.name] if self.name else found


class Texts(Only):
    """`Only`, with names of inputs that exporters can see."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


class RealTokens(Texts):
    """`Texts` with zeros for padding: no tool is judged by what it computes there."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return super().forward(input_ids, attention_mask) * attention_mask[..., None]


class Sounds(Only):
    """The same for models over features of sound."""

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return super().forward(input_features=input_features)


class Waves(Only):
    """The same for models over samples of sound."""

    def forward(self, input_values: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return super().forward(input_values=input_values)


class Voice(Only):
    """The same for vocoders."""

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Return samples of sound."""
        return super().forward(spectrogram=spectrogram)


class Pictures(Only):
    """The same for models over pictures."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return super().forward(pixel_values=pixel_values)


class Detector(nn.Module):
    """A detector of one stage: boxes in pixels and scores in [0, 1] are rows of one tensor."""

    CLASSES = 20

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        steps = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU())
            for a, b in zip(widths, widths[1:], strict=False)
        ]
        self.backbone = nn.Sequential(*steps)
        self.boxes = nn.Sequential(nn.Conv2d(256, 64, 3, 1, 1), nn.SiLU(), nn.Conv2d(64, 4, 1))
        self.scores = nn.Sequential(nn.Conv2d(256, 64, 3, 1, 1), nn.SiLU(), nn.Conv2d(64, self.CLASSES, 1))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return [batch, 4 + classes, places]."""
        features = self.backbone(pixel_values)
        boxes = self.boxes(features).sigmoid() * 640.0
        scores = self.scores(features).sigmoid()
        return torch.cat([boxes, scores], 1).flatten(2)


def cases() -> dict[str, Callable[[], Case]]:
    """Return how each case is made, by name."""
    makers = (voice, detector, tagger, recordings, layout, padding, encoder, half, tiny, speech)
    return {maker.__name__: maker for maker in makers}


def voice() -> Case:
    """Return a vocoder: transposed convolutions, and many convolutions over long signals."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    model = Voice(SpeechT5HifiGan(SpeechT5HifiGanConfig(upsample_initial_channel=256)), "")
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            nn.init.kaiming_normal_(module.weight)
    made = _batches(lambda: {"spectrogram": torch.randn(1, 80, 80)})
    return _case("voice", "https://github.com/k2-fsa/sherpa-onnx/issues/575", model, made, free=(1,))


def detector() -> Case:
    """Return a detector whose boxes and scores share a tensor."""
    model = Detector()
    last = model.scores[-1]
    with torch.no_grad():
        for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
            norm.momentum = 1.0
        model.train()(torch.randn(8, 3, 320, 320))  # statistics of the norms
        model.eval()
        logits = model.scores(model.backbone(torch.randn(4, 3, 320, 320)))
        last.weight *= 1.5 / logits.std()
        last.bias.fill_(-3.0)  # few scores are high, as in trained ones
    made = _batches(lambda: {"pixel_values": torch.randn(1, 3, 320, 320)})
    return _case(
        "detector",
        "https://github.com/ultralytics/ultralytics/pull/25524",
        model,
        made,
        asked="scores above .3 that stay above",
        judge=_scores_kept(made[1]),
    )


def tagger() -> Case:
    """Return GLiNER's encoder: attention with relative positions."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=1000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )
    made = _batches(lambda: _ids(4, 96))
    thread = "https://github.com/urchade/GLiNER/issues/218"
    return _case("tagger", thread, Texts(DebertaV2Model(config)), made, free=(0, 1))


def recordings() -> Case:
    """Return an encoder of speech that is calibrated with short recordings and gets long ones."""
    from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

    config = Wav2Vec2ConformerConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        conv_dim=(256,) * 7, num_conv_pos_embeddings=32, position_embeddings_type="relative",
    )  # fmt: skip
    short = _batches(lambda: {"input_values": torch.randn(1, 32000)})
    long = [{"input_values": torch.randn(1, 256000)}]
    return _case(
        "recordings",
        "https://github.com/istupakov/onnx-asr/issues/126",
        Waves(Wav2Vec2ConformerModel(config)),
        short,
        free=(1,),
        asked="error of a recording 8 times as long",
        judge=lambda base, run: Figure(decibels(base, run, long), "dB"),
    )


def layout() -> Case:
    """Return a detector of page layouts: RT-DETR, whose attention samples a grid."""
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, encoder_in_channels=[64, 128, 256], num_queries=100, decoder_layers=3,
        anchor_image_size=[320, 320],
    )  # fmt: skip
    made = _batches(lambda: {"pixel_values": torch.randn(1, 3, 320, 320)})
    thread = "https://github.com/docling-project/docling.rs/pull/121"
    return _case("layout", thread, Pictures(RTDetrForObjectDetection(config), "logits"), made)


def padding() -> Case:
    """Return MiniLM with its weights: does a text's vector depend on the other texts of its batch?"""
    tokenizer = minilm.load_tokenizer()
    calibration, texts = minilm.split()
    names = ("input_ids", "attention_mask")
    made = tuple(
        [{name: batch[name] for name in names} for batch in minilm.batches(part, tokenizer)]
        for part in (calibration, texts[:64])
    )
    return _case(
        "padding",
        "https://github.com/microsoft/onnxruntime/issues/8625",
        RealTokens(minilm.load_model()),
        made,
        free=(0, 1),
        asked="least cosine of a text alone and in its batch",
        judge=_alone(made[1]),
    )


def encoder() -> Case:
    """Return BERT-base."""
    from transformers import BertConfig, BertModel

    made = _batches(lambda: _ids(1, 128))
    thread = "https://github.com/microsoft/onnxruntime/issues/6695"
    return _case("encoder", thread, Texts(BertModel(BertConfig(vocab_size=1000))), made, free=(0, 1))


def half() -> Case:
    """Return a small BERT in fp16, as models of GPUs are saved."""
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=1000, hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
    made = _batches(lambda: _ids(1, 128))
    thread = "https://github.com/microsoft/onnxruntime/issues/25824"
    return _case("half", thread, Texts(BertModel(config).half()), made, free=(0, 1))


def tiny() -> Case:
    """Return a small network that gets one row at a time."""
    layers = [512, 256, 128, 64, 1]
    steps: list[nn.Module] = []
    for a, b in zip(layers, layers[1:], strict=False):
        steps += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*steps[:-1])
    made = _batches(lambda: {"input": torch.randn(1, 512)})
    return _case("tiny", "https://github.com/pytorch/ao/issues/2989", model, made)


def speech() -> Case:
    """Return the encoder of Whisper base: 30 seconds, always."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048
    )  # those of Whisper base
    made = _batches(lambda: {"input_features": torch.randn(1, 80, 3000)}, calibration=2)
    thread = "https://github.com/ailia-ai/ailia-models/pull/1831"
    return _case("speech", thread, Sounds(WhisperEncoder(config)), made)


@torch.no_grad()
def decibels(base: Run, run: Run, batches: list[Batch]) -> float:
    """Return the signal-to-noise ratio of all outputs of some batches, in dB."""
    signal = noise = 0.0
    for batch in batches:
        expected, got = base(**batch).double(), run(**batch).double()
        signal += float(expected.square().sum())
        noise += float((expected - got).square().sum())
    return round(float(10 * torch.log10(torch.tensor(signal / noise))), 1) if noise else float("inf")


def _scores_kept(batches: list[Batch]) -> Judge:
    @torch.no_grad()
    def judge(base: Run, run: Run) -> Figure:
        kept = found = 0
        for batch in batches:
            high = base(**batch)[:, 4:] > 0.3
            found += int(high.sum())
            kept += int((run(**batch)[:, 4:] > 0.3)[high].sum())
        return Figure(round(100 * kept / found, 1), "%")

    return judge


def _alone(batches: list[Batch]) -> Judge:
    @torch.no_grad()
    def judge(_: Run, run: Run) -> Figure:
        least = 1.0
        for batch in batches[:2]:
            together = run(**batch)
            for row, mask in enumerate(batch["attention_mask"].bool()):
                count = int(mask.sum())
                one = {name: tensor[row : row + 1, :count] for name, tensor in batch.items()}
                vectors = together[row, :count].double().mean(0), run(**one)[0].double().mean(0)
                least = min(least, float(torch.cosine_similarity(*vectors, dim=0)))
        return Figure(round(least, 6), "cosine")

    return judge


def _batches(
    make: Callable[[], Batch], calibration: int = 8, evaluation: int = 4
) -> tuple[list[Batch], list[Batch]]:
    """Return batches to calibrate with, and others."""
    return [make() for _ in range(calibration)], [make() for _ in range(evaluation)]


def _ids(batch: int, tokens: int) -> Batch:
    return {
        "input_ids": torch.randint(1, 1000, (batch, tokens)),
        "attention_mask": torch.ones(batch, tokens, dtype=torch.long),
    }


def _case(name: str, thread: str, model: nn.Module, made: Any, **options: Any) -> Case:
    calibration, evaluation = made
    return Case(name, thread, model.eval(), calibration, evaluation, **options)


def all_cases(names: list[str]) -> Iterator[Case]:
    """Yield cases of some names, each with the same seed."""
    makers = cases()
    for name in names:
        torch.manual_seed(0)
        yield makers[name]()
