"""Folders of transformers models get low-bit weights block by block.

The same as in memory, resumable, on the command line.
"""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from suites.small_llama import random_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import nc
from nc import (
    GPTQ,
    ArtefactCorruptError,
    ArtefactError,
    ArtefactMissingError,
    InputError,
    Rotation,
    UnsupportedError,
    WeightOnlyConfig,
)
from nc.api.pretrained import quantize_folder
from nc.cli.main import main
from nc.formats.tensor_format import DoubleQuant
from nc.modules.block_calls import _without_copies
from nc.weights import driver as blocks
from nc.weights.files import streamed

CONFIG = WeightOnlyConfig("int4", group_size=32, solver=GPTQ())


def llama(tied=False):
    return random_llama(num_hidden_layers=3, tie_word_embeddings=tied)


def samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (1, 16), generator=generator) for _ in range(4)]


@pytest.fixture
def source(tmp_path):
    llama().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_gives_what_the_model_in_memory_gives(tied, tmp_path):
    model = llama(tied)
    model.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    prepared = nc.prepare(model, CONFIG)
    for ids in samples():
        prepared(ids)
    expected, loaded = nc.convert(prepared), nc.load(tmp_path / "out")
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in expected.state_dict().items())
    assert torch.equal(loaded(samples()[0]).logits, expected(samples()[0]).logits)
    assert loaded.generate(samples()[0], max_new_tokens=3).shape == (1, 19)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_without_data(source, tmp_path):
    quantize_folder(source, WeightOnlyConfig("nf4", group_size=32), tmp_path / "out")
    expected = nc.quantize(llama(), WeightOnlyConfig("nf4", group_size=32))
    loaded = nc.load(tmp_path / "out")
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in expected.state_dict().items())


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.sample(2)
def test_a_run_that_was_stopped_goes_on_and_gives_the_same_bytes(stop, source, tmp_path):
    quantize_folder(source, CONFIG, tmp_path / "whole", samples())
    seen = []

    def interrupted(done, total, name):
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, CONFIG, tmp_path / "out", samples(), progress=interrupted)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").iterdir()}
    assert len(kept) == stop + 1
    quantize_folder(source, CONFIG, tmp_path / "out", samples(), progress=lambda *call: seen.append(call))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_an_earlier_run_with_other_data_is_not_used(source, tmp_path):
    def interrupted(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, CONFIG, tmp_path / "out", samples()[:2], progress=interrupted)
    quantize_folder(source, CONFIG, tmp_path / "out", samples())
    quantize_folder(source, CONFIG, tmp_path / "whole", samples())
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_the_folder_of_another_run_whose_removal_was_stopped_is_removed(source, tmp_path, monkeypatch):
    """Wherever it was stopped."""

    def interrupted(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, CONFIG, tmp_path / "kept", samples()[:2], progress=interrupted)
    partial, removed, stop = tmp_path / "out.partial", [], 0

    def stopping(real):
        def remove(*args, **kwargs):
            removed.append(args)
            if len(removed) == stop:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return remove

    def opened(job):
        return streamed.StreamedWeights(torch.nn.Linear(1, 1), {}, (), partial, job)

    for stop in itertools.count(1):
        shutil.copytree(tmp_path / "kept.partial", partial)
        removed.clear()
        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, stopping(getattr(os, name)))
            with contextlib.suppress(KeyboardInterrupt):
                opened("another job")
        if len(removed) < stop:
            break
        opened("another job")
        assert not partial.exists()
    assert stop > 9  # two blocks of three files and their folders, the job, and the folder itself


def test_a_folder_of_another_run_that_cannot_be_removed_is_a_typed_error(source, tmp_path, monkeypatch):
    def interrupted(done, total, name):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, CONFIG, tmp_path / "out", samples()[:2], progress=interrupted)

    def refused(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        with pytest.raises(nc.ArtefactError, match=r"out.partial cannot be written: Permission denied"):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors at one time, of those that were made while it is active."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel() > 500:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage._cdata in self.storages and not self.storages[storage._cdata][0].expired():
            return
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))


@pytest.mark.once
class TestMemory:
    """A model of six blocks.

    Everything that works in pieces works in pieces that are small beside a block.
    """

    BLOCKS, HIDDEN, INNER, SAMPLES, LENGTH = 6, 64, 176, 4, 16
    BLOCK = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176 + 2 * 64)
    SUMS = 8 * (3 * 64 * 64 + 176 * 176)

    @pytest.fixture
    def deep(self, tmp_path, monkeypatch):
        monkeypatch.setattr("nc.numerics.groups.CHUNK", 1024)
        monkeypatch.setattr("nc.modules.statistics._ROWS", 16)
        sizes = {"hidden_size": self.HIDDEN, "intermediate_size": self.INNER}
        model = random_llama(num_hidden_layers=self.BLOCKS, **sizes)
        model.save_pretrained(tmp_path / "deep", max_shard_size="300KB")
        return tmp_path / "deep"

    def peak(self, source, config, data, out):
        with LiveBytes() as live:
            quantize_folder(source, config, out, data)
        return live.peak

    def test_without_data_it_is_two_blocks(self, deep, tmp_path):
        config = WeightOnlyConfig("int8", group_size=16, w_algo="minmax")
        peak = self.peak(deep, config, [], tmp_path / "out")
        assert self.BLOCK < peak < 2 * self.BLOCK
        expected = nc.quantize(LlamaForCausalLM.from_pretrained(deep), config)
        assert all(
            torch.equal(nc.load(tmp_path / "out").state_dict()[k], v)
            for k, v in expected.state_dict().items()
        )

    @pytest.mark.parametrize("solver", [GPTQ(), GPTQ(order="groups")])
    @pytest.mark.sample(1)
    def test_with_data_it_is_also_the_statistics_and_the_hidden_states(self, solver, deep, tmp_path):
        generator = torch.Generator().manual_seed(0)
        data = [torch.randint(0, 100, (1, self.LENGTH), generator=generator) for _ in range(self.SAMPLES)]
        hidden = self.SAMPLES * self.LENGTH * self.HIDDEN * 4
        config = WeightOnlyConfig("int4", group_size=16, scale_dtype="fp16", w_algo="minmax", solver=solver)
        peak = self.peak(deep, config, data, tmp_path / "out")
        assert self.BLOCK + self.SUMS < peak < 2 * self.BLOCK + self.SUMS + hidden

    @pytest.mark.exhaustive
    def test_of_the_feedback_of_errors_gptq_holds_what_is_above_the_diagonal(self, deep, tmp_path):
        data = [torch.randint(0, 100, (1, self.LENGTH)) for _ in range(self.SAMPLES)]
        hidden, half = self.SAMPLES * self.LENGTH * self.HIDDEN * 4, self.INNER**2 * 4 / 2
        config = WeightOnlyConfig(
            "int4", group_size=16, scale_dtype="fp16", w_algo="minmax", solver=GPTQ(block=16)
        )
        assert self.peak(deep, config, data, tmp_path / "out") < 2 * self.BLOCK + self.SUMS + hidden - half

    @pytest.mark.skipif(
        not hasattr(ctypes.CDLL(None), "malloc_trim"),
        reason="only glibc keeps freed memory, and can give it back",
    )
    def test_freed_memory_goes_back_to_the_system(self):
        """In a process of its own: what others leave in the heap changes what is given back."""
        program = """
            from pathlib import Path
            from nc.process.malloc import give_back_small_pieces

            def pages():
                return int(Path("/proc/self/statm").read_text().split()[1])

            pieces = {i: bytearray(b"x") * (100_000 if i % 2 else 1000) for i in range(2000)}
            for i in range(1, 2000, 2):
                del pieces[i]
            before = pages()
            give_back_small_pieces()
            print((before - pages()) * 4096)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) > 80_000_000

    def test_it_goes_back_after_each_layer_and_block(self, deep, tmp_path, monkeypatch):
        seen = []
        for owner, name in ((blocks, "replace"), (streamed.StreamedWeights, "finish")):
            function = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *args, call=function, what=name: (call(*args), seen.append(what))
            )
        for module in (blocks, streamed):
            monkeypatch.setattr(module, "give_back_small_pieces", lambda: seen.append("back"))
        quantize_folder(deep, WeightOnlyConfig("int8", group_size=16, w_algo="minmax"), tmp_path / "out")
        assert {"replace", "finish"} < set(seen)
        assert seen[-1] == "back"
        assert all(behind == "back" for what, behind in itertools.pairwise(seen) if what != "back")

    @pytest.mark.exhaustive
    def test_hidden_states_beyond_the_limit_are_in_files(self, deep, tmp_path, monkeypatch):
        data = [
            torch.randint(0, 100, (1, 32)) for _ in range(64)
        ]  # what attention makes on its way is small beside all hidden states
        hidden = 64 * 32 * self.HIDDEN * 4
        config = WeightOnlyConfig("int8", group_size=-1, w_algo="minmax", solver=GPTQ())
        inside = self.peak(deep, config, data, tmp_path / "inside")
        monkeypatch.setattr("nc.modules.activations.Activations.__init__.__defaults__", (0,))
        outside = self.peak(deep, config, data, tmp_path / "outside")
        assert outside < inside - hidden / 2
        assert files(tmp_path / "inside") == files(tmp_path / "outside")


@pytest.mark.parametrize("options", [{"lm_head": "int8"}, {"lm_head": "int8", "embedding": "int8"}])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("data", [[], samples()])
@pytest.mark.sample(3)
def test_what_is_outside_of_blocks(options, tied, data, tmp_path):
    """With data the head is solved for what the quantized blocks in front of it give."""
    config = WeightOnlyConfig("int4", group_size=32, solver=GPTQ() if data else None, **options)
    model = llama(tied)
    model.save_pretrained(tmp_path / "source")
    report = quantize_folder(tmp_path / "source", config, tmp_path / "out", data)
    if data:
        prepared = nc.prepare(model, config)
        for ids in data:
            prepared(ids)
        expected = nc.convert(prepared)
    else:
        expected = nc.quantize(model, config)
    nc.save(expected, tmp_path / "expected")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()

    def said(report):
        return [
            (x.operator, x.form, x.solver, x.loss, x.rtn_loss, x.bits, x.size, x.kernel, x.note)
            for x in report.layers
        ], report.weight_bytes

    assert said(report) == said(nc.report(expected)) == said(nc.report(nc.load(tmp_path / "out")))


def test_a_model_in_bf16_keeps_its_dtype(tmp_path):
    model = llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    report = quantize_folder(tmp_path / "source", WeightOnlyConfig("int4", group_size=32), tmp_path / "out")
    loaded = nc.load(tmp_path / "out")
    assert (
        loaded.model.norm.weight.dtype
        == loaded.lm_head.weight.dtype
        == loaded.model.layers[0].mlp.up_proj.weight.dtype
        == torch.bfloat16
    )
    assert next(layer.bits for layer in report.layers if layer.operator == "lm_head") == 16


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def bert():  # it does not generate
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT))


def falcon():  # its linears have a forward of their own, which can only be tried with values
    return transformers.FalconForCausalLM(transformers.FalconConfig(**TEXT))


def clip():  # two configurations inside
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=32)
    )


def detr():  # attention by sdpa, with convolutions inside, for which there is none
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_queries": 5,
    }
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    options = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": backbone,
    }
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(**options, **sizes, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)
    )


def llava():  # transformers 4 renames tensors while it saves and loads them
    texts = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    images = transformers.CLIPVisionConfig(**IMAGE)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=texts, vision_config=images, image_token_index=3)
    )


def mamba2():  # its configuration holds an infinite number, which JSON has not
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 1,
    }
    return transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )


@pytest.mark.parametrize("build", [bert, falcon, clip, detr, llava, mamba2])
@pytest.mark.sample(3)
def test_other_architectures(build, tmp_path):
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path / "source")
    config = WeightOnlyConfig("int4", group_size=32)
    quantize_folder(tmp_path / "source", config, tmp_path / "out")
    nc.save(nc.quantize(model, config), tmp_path / "expected")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()
    loaded = nc.load(tmp_path / "out")
    assert type(loaded) is type(model)
    assert getattr(loaded.config, "use_cache", None) is getattr(model.config, "use_cache", None)
    assert list(getattr(loaded.config, "time_step_limit", ())) == list(
        getattr(model.config, "time_step_limit", ())
    )


def changed(source, change):
    """The file of a folder with other tensors."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_files_that_hold_two_values_for_tied_weights(tmp_path):
    """Transformers 5 does not tie them then; transformers 4 takes the embeddings."""
    llama(tied=True).save_pretrained(tmp_path / "source")
    changed(tmp_path / "source", lambda tensors: tensors.update({"lm_head.weight": torch.randn(100, 64)}))
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    prepared = nc.prepare(LlamaForCausalLM.from_pretrained(tmp_path / "source").eval(), CONFIG)
    for ids in samples():
        prepared(ids)
    nc.save(nc.convert(prepared), tmp_path / "expected")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == (
        tmp_path / "expected" / "weights.safetensors"
    ).read_bytes()


def test_files_that_hold_tied_weights_twice(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "source")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "expected", samples())
    changed(
        tmp_path / "source",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    assert files(tmp_path / "out") == files(tmp_path / "expected")


def test_files_that_hold_a_tensor_under_two_names(source, tmp_path):
    """That of the model counts, not that of the model without its head."""
    changed(source, lambda tensors: tensors.update({"norm.weight": torch.full((64,), 7.0)}))
    quantize_folder(source, CONFIG, tmp_path / "out", samples())
    assert torch.equal(nc.load(tmp_path / "out").model.norm.weight, torch.ones(64))


def bart():
    sizes = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 100,
    }
    return BartForConditionalGeneration(
        BartConfig(**sizes, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)
    )


def resnet():
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    )


@pytest.mark.parametrize(
    ("build", "optional"), [(bart, "final_logits_bias"), (resnet, "num_batches_tracked")]
)
def test_buffers_that_files_may_lack(build, optional, tmp_path):
    """Transformers gives them their first values without a word."""
    build().save_pretrained(tmp_path / "source")
    config = WeightOnlyConfig("int4", group_size=32)
    quantize_folder(tmp_path / "source", config, tmp_path / "expected")

    def without(tensors):
        lacking = [name for name in tensors if name.endswith(optional)]
        assert lacking
        for name in lacking:
            del tensors[name]

    changed(tmp_path / "source", without)
    quantize_folder(tmp_path / "source", config, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "expected")


def test_other_files_beside_those_of_the_index(tmp_path):
    """A variant in fp16, or the files of another tool, are not read."""
    llama().save_pretrained(tmp_path / "source", max_shard_size="100KB")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "expected", samples())
    other = {name: torch.zeros_like(tensor) for name, tensor in llama().state_dict().items()}
    save_file(other, tmp_path / "source" / "model.fp16-00001-of-00001.safetensors")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    shard = min((tmp_path / "source").glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(
        ArtefactMissingError, match=f"has no {shard.name}, which model.safetensors.index.json names"
    ):
        quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json' is not JSON"),
        ("config.json", "[]", "config.json' is not a JSON object, but a list"),
        (
            "config.json",
            '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10000000}',
            "no model that can be built",
        ),
        ("generation_config.json", "{", "generation_config.json' is not JSON"),
    ],
)
def test_configurations_that_are_damaged(name, text, message, source, tmp_path):
    (source / name).write_text(text)
    with pytest.raises(ArtefactCorruptError, match=message):
        quantize_folder(source, CONFIG, tmp_path / "out", samples())


@pytest.mark.parametrize("use_cache", [False, True])
def test_the_configuration_stays_what_it_was(use_cache, tmp_path):
    model = llama()
    model.config.use_cache = use_cache
    model.save_pretrained(tmp_path / "source")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    assert nc.load(tmp_path / "out").config.use_cache is use_cache


def test_values_that_are_buffers_come_from_the_files_too(tmp_path):
    """The router of DeepSeek-V3 has a trained bias that is no parameter."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    ranks = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes, **experts, **ranks, vocab_size=100)
    ).eval()
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.normal_()
    model.save_pretrained(tmp_path / "source")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    assert torch.equal(nc.load(tmp_path / "out").model.layers[1].mlp.gate.e_score_correction_bias, bias)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_files_of_a_quantized_model_are_refused(dtype, source, tmp_path):
    """Their codes would be taken for weights."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors |= {name: (8 * tensors[name]).to(dtype), f"{name}_scale_inv": torch.ones(1)}
    save_file(tensors, path)
    with pytest.raises(
        ArtefactCorruptError, match=f"'{name}' has dtype {dtype}; the files are of a quantized model"
    ):
        quantize_folder(source, CONFIG, tmp_path / "out", samples())


def test_an_encoder_and_a_decoder(tmp_path):
    """Blocks of the first stack are called while those of the second one are reached for.

    Each is read for that time only.
    """
    torch.manual_seed(0)
    sizes = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    model = BartForConditionalGeneration(
        BartConfig(
            **sizes, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, max_position_embeddings=64
        )
    ).eval()
    model.save_pretrained(tmp_path / "source")
    quantize_folder(tmp_path / "source", CONFIG, tmp_path / "out", samples())
    prepared = nc.prepare(model, CONFIG)
    for ids in samples():
        prepared(ids)
    expected, loaded = nc.convert(prepared), nc.load(tmp_path / "out")
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in expected.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({"w_dtype": "int4", "group_size": 64, "scale_dtype": "fp16"}, lambda k: 4 + 16 / 64),
        (
            {"w_dtype": "int4", "group_size": 32, "scale_dtype": "fp16", "w_sym": False},
            lambda k: 4 + (16 + 4) / 32,
        ),
        ({"w_dtype": "int3", "group_size": 64, "scale_dtype": "fp16"}, lambda k: 3 + 16 / 64),
        ({"w_dtype": "nf4", "group_size": 64, "scale_dtype": "fp16"}, lambda k: 4 + 16 / 64),
        (
            {"w_dtype": "int4", "group_size": 64, "double_quant": DoubleQuant()},
            lambda k: 4 + (8 + 32 / (k / 64)) / 64,
        ),
    ],
    ids=["int4", "affine int4", "int3", "nf4", "double quant"],
)
def test_the_size_on_disk_is_that_of_the_formula(fields, bits, tmp_path):
    """All files together, less what stays float, against b + (scale + zero bits) / group, by hand.

    A row has fewer than 256 scales.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = random_llama(hidden_size=512, intermediate_size=1024, **heads)
    model.save_pretrained(tmp_path / "source")
    config = WeightOnlyConfig(**{**fields, "w_algo": "minmax"})
    quantize_folder(tmp_path / "source", config, tmp_path / "out")
    nc.save(nc.quantize(model, config), tmp_path / "saved")
    low = [
        module.weight
        for block in model.model.layers
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    rest = sum(4 * p.numel() for p in model.parameters()) - sum(4 * weight.numel() for weight in low)
    expected = sum(weight.numel() * bits(weight.shape[1]) / 8 for weight in low)
    for folder in ("out", "saved"):
        stored = sum(path.stat().st_size for path in (tmp_path / folder).iterdir())
        assert stored - rest == pytest.approx(expected, rel=0.02)


class TestRefusals:
    def test_no_safetensors(self, source, tmp_path):
        (source / "model.safetensors").unlink()
        (source / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ArtefactMissingError, match=r"pickles"):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())

    def test_a_file_that_is_cut(self, source, tmp_path):
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(ArtefactCorruptError, match=r"model\.safetensors cannot be read"):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())

    def test_a_tensor_that_is_missing_or_of_another_shape(self, source, tmp_path):
        path, name = source / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
        tensors = load_file(path)
        save_file({k: v for k, v in tensors.items() if k != name}, path)
        with pytest.raises(ArtefactCorruptError, match=rf"no tensor '{name}'"):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())
        save_file({**tensors, name: tensors[name][:5].clone()}, path)
        with pytest.raises(ArtefactCorruptError, match=r"\(5, 64\).*\(128, 64\)"):
            quantize_folder(source, CONFIG, tmp_path / "other", samples())

    def test_a_class_that_is_not_listed(self, source, tmp_path):
        path = source / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Surprise"]}))
        with pytest.raises(ArtefactError, match="Surprise"):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())

    def test_what_needs_more_than_there_is(self, source, tmp_path):
        with pytest.raises(InputError, match="gptq needs calibration data"):
            quantize_folder(source, CONFIG, tmp_path / "out")
        with pytest.raises(UnsupportedError, match="rotation"):
            quantize_folder(
                source,
                WeightOnlyConfig("int4", group_size=32, transforms=[Rotation()]),
                tmp_path / "out",
                samples(),
            )

    def test_nothing_is_left_and_nothing_is_lost(self, source, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("mine")
        with pytest.raises(ArtefactError):
            quantize_folder(source, CONFIG, tmp_path / "out", samples())
        assert files(tmp_path / "out") == {"thesis.txt": b"mine"}
        with pytest.raises(InputError):
            quantize_folder(source, CONFIG, tmp_path / "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


class TestCommandLine:
    @pytest.fixture
    def with_tokenizer(self, source):
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(source)
        return source

    def run(self, *args):
        return CliRunner().invoke(main, ["quantize", *map(str, args)])

    def test_the_whole_way(self, with_tokenizer, tmp_path):
        (tmp_path / "texts.txt").write_text("a b c a a b " * 40)
        options = [
            "--weights",
            "int4",
            "--group-size",
            32,
            "--solver",
            "gptq",
            "--length",
            16,
            "--samples",
            4,
        ]
        result = self.run(
            with_tokenizer, *options, "--calib", tmp_path / "texts.txt", "--out", tmp_path / "out"
        )
        assert result.exit_code == 0, result.output
        assert "block 1 of 4: model.layers.0" in result.output
        assert "s left)" in result.output
        assert "21 of 23 layers have low-bit weights" in result.output
        loaded = nc.load(tmp_path / "out")
        assert loaded.model.layers[0].mlp.up_proj.result.tokens == 64
        prepared = nc.prepare(llama(), CONFIG)
        for i in range(4):
            prepared(torch.tensor([[0, 1, 2, 0, 0, 1] * 40])[:, 16 * i : 16 * (i + 1)])
        assert torch.equal(
            loaded.model.layers[2].mlp.up_proj.codes, nc.convert(prepared).model.layers[2].mlp.up_proj.codes
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--solver", "gptq", "--group-size", 32], "gptq needs calibration data"),
            (["--weights", "int9"], "int9"),
            (["--group-size", 48], "48 does not divide"),
            (["--weights", "int4", "--config", "config.json"], "not both"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, options, message, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        CONFIG.to_json_file(tmp_path / "config.json")
        result = self.run(source, *options, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert message in result.output
        assert "Traceback" not in result.output
        assert not (tmp_path / "out").exists()

    def test_texts_that_are_too_short(self, with_tokenizer, tmp_path):
        (tmp_path / "texts.txt").write_text("a b c")
        result = self.run(
            with_tokenizer, "--solver", "gptq", "--calib", tmp_path / "texts.txt", "--out", tmp_path / "out"
        )
        assert result.exit_code == 2
        assert "3 tokens, fewer than one piece of 512" in result.output

    def test_options_of_folders_are_refused_for_factories(self, tmp_path):
        result = self.run("package:factory", "--weights", "int4", "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert "is not a folder" in result.output


def test_equal_tensors_of_calls_are_kept_once():
    """Not those of another dtype or layout, which kernels may round otherwise."""
    one, same, half = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float16)
    columns, other, empty = torch.ones(4, 4).t()[:, ::2], torch.full((4, 4), 2.0), torch.zeros(0)
    kept = {}
    (first,) = _without_copies((((one, 3, None, empty), {"mask": same, "half": half}),), kept)
    (second,) = _without_copies((((torch.ones(4, 4), columns), {"mask": other}),), kept)
    assert first[0][0] is first[1]["mask"] is second[0][0] is one
    assert (first[0][1], first[0][2], first[1]["half"]) == (3, None, half)
    assert second[0][1] is columns
    assert second[1]["mask"] is other
