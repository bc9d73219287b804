"""Break the package on purpose, one place at a time, and see whether the short suite notices.

    python test/mutations.py [NAME…] [--targeted] [--list]

`make mutations` runs it in its environments: what needs IPEX in .venv, what is emulated in .venv-emulated, the
rest in .venv-native. Each
mutation is made in a copy of the repository. First the test files run that should notice it; if they do not,
the whole short suite (not with --targeted), and the test that notices it must pass without it. A mutation
that no test notices is a guarantee without a test: write that test. A text that is no longer in its file is
an error: the code has moved on, so must this list.

A CPU without some of the instruction sets can't run all C code: there, a fault in kernels or in what calls them
that no test notices is not decided (exit code 3).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import isas

from nc import available_backends
from nc.backends import cpu
from nc.kernels.c_code.isas import ISAS

ROOT = Path(__file__).parents[1]
#: Exit code where no fault is known to be without a test, and some could not be decided on this CPU.
UNDECIDED = 3
#: What computes in other ways with other instruction sets.
_BY_ISA = ("kernels/", "backends/native/", "backends/low_bit/")
_LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info")


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Attributes:
        name: for the command line and the table.
        guarantee: what no longer holds.
        file: where, below nc/.
        text: what stands there, exactly once.
        fault: what to put there instead.
        tests: names of test files, without "test_", that should notice it.
        ipex: only IPEX can notice it.
        emulated: an instruction set that tests emulate, so that every CPU notices it.
    """

    name: str
    guarantee: str
    file: str
    text: str
    fault: str
    tests: tuple[str, ...]
    ipex: bool = False
    emulated: str = ""

    @property
    def environment(self) -> str:
        """Which of the environments of `make mutations` can notice it."""
        return "ipex" if self.ipex else "emulated" if self.emulated else "native"


MUTATIONS = (
    Mutation(
        "readers-on-paths-not-taken",
        "a norm is left alone if others read it on a path that calibration did not take",
        "algorithms/transforms/paths.py",
        "    if seen.depends:\n",
        "    if False:\n",
        ("paths",),
    ),
    Mutation(
        "readers-without-a-token",
        "a norm is left alone if no token reached a layer that reads it",
        "algorithms/transforms/scale_sets.py",
        "if not t.tokens]",
        "if False]",
        ("paths",),
    ),
    Mutation(
        "harm-of-one-expert",
        "the harm of an expert is not averaged away",
        "weights/held_out.py",
        "and lost > old * (1 + rows**-0.5)",
        "and False",
        ("paths",),
    ),
    Mutation(
        "capture-on-another-thread",
        "a capture on another thread changes no bit of low-bit layers",
        "process/traced.py",
        "    return not plain or torch._C._len_torch_dispatch_stack() > 0\n",
        "    return True\n",
        ("low_bit_engines",),
    ),
    Mutation(
        "users-file-replaced",
        "what nc did not write stays",
        "storage/atomic.py",
        "        known = ours(target)\n",
        "        known = ours(target) or True\n",
        ("writers",),
    ),
    Mutation(
        "users-folder-replaced",
        "a folder of nc.hf with a file of the user's stays",
        "hf/checksums.py",
        "return all(path.relative_to(folder).as_posix() in known or _is_covered(path) for path in found)",
        "return True",
        ("checksums",),
    ),
    Mutation(
        "newer-replaced",
        "a newer schema is not overwritten",
        "storage/marks.py",
        "if schema > newest:",
        "if False:",
        ("writers",),
    ),
    Mutation(
        "lost-link",
        "a link that leads nowhere is an error",
        "storage/atomic.py",
        "lost = given.is_symlink() and not target.exists()",
        "lost = False",
        ("writers",),
    ),
    Mutation(
        "json-too-deep",
        "lists in lists have a limit",
        "text/json_text.py",
        "if depth > MOST_DEPTH:",
        "if False:",
        ("json_text",),
    ),
    Mutation(
        "json-of-another-type",
        "a text is no number",
        "text/json_text.py",
        "if type(value) is not kind:",
        "if False:",
        ("json_text",),
    ),
    Mutation(
        "warned-before-the-checksum",
        "of a damaged artefact nothing else is said",
        "process/warn.py",
        "    if held is None:\n",
        "    if True:\n",
        ("artefact",),
    ),
    Mutation(
        "too-many-values",
        "a graph that asks for too much memory is refused",
        "storage/arguments.py",
        "if asked > MOST_VALUES:",
        "if False:",
        ("amounts",),
    ),
    Mutation(
        "threads-of-a-quota",
        "a part of a CPU is no thread",
        "process/cores.py",
        "int(self.quota))",
        "int(self.quota) + 1)",
        ("cores",),
    ),
    Mutation(
        "gptq-version-under-its-other-name",
        "zero points of GPTQ files of version 2 are not offset, whatever names the version",
        "interchange/gptq.py",
        '_VERSION = ("checkpoint_format", "format")',
        '_VERSION = ("checkpoint_format",)',
        ("interchange",),
    ),
    Mutation(
        "settings-that-are-not-known",
        "a setting of foreign files that may change results is refused",
        "interchange/layer.py",
        "if name not in known and value:",
        "if False:",
        ("interchange",),
    ),
    Mutation(
        "threads-that-somebody-chose",
        "load changes no number of threads that somebody chose",
        "process/cores.py",
        "or OMP_NUM_THREADS.is_set",
        "or False",
        ("cores",),
    ),
    Mutation(
        "quota-of-outer-groups",
        "a quota of a group around the innermost one counts",
        "process/cores.py",
        "yield from (inner, *(folder for folder in inner.parents if folder.is_relative_to(top)))",
        "yield from (inner,)",
        ("cores",),
    ),
    Mutation(
        "names-of-outputs",
        "no output has the name of an input",
        "graph/output_names.py",
        "    taken = {leaf.path for leaf in signature.leaves}\n",
        "    taken = set()\n",
        ("output_names",),
    ),
    Mutation(
        "warm-sizes",
        "a model is called with the declared sizes",
        "api/warm.py",
        "        return named[first.path]\n",
        "        return tuple(examples[leaf.path].shape)\n",
        ("warm",),
    ),
    Mutation(
        "forked-threads",
        "forked processes do not wait for threads of their parent",
        "kernels/c_code/openmp.py",
        "        refused[:] = [pause(_HARD) != 0]\n",
        "        refused[:] = [False]\n",
        ("native",),
    ),
    Mutation(
        "guards-of-saved-layers",
        "without nc a folder of low-bit layers fails",
        "hf/saved_layers.py",
        "    return {**model.state_dict(), **guards}\n",
        "    return dict(model.state_dict())\n",
        ("at_load",),
    ),
    Mutation(
        "initializers-of-parents",
        "what is quantized at load and saved is loaded, whatever the class initializes",
        "nn/tensor.py",
        "    _is_hf_initialized = True\n",
        "    _is_hf_initialized = False\n",
        ("ways_out",),
    ),
    Mutation(
        "heads-of-another-size",
        "no low-bit tensor of another shape is left to transformers, which would fill it",
        "hf/saved_layers.py",
        "if tuple(found[key].shape) != tuple(tensor.shape):",
        "if False:",
        ("ways_out",),
    ),
    Mutation(
        "save-pretrained-of-low-bit-models",
        "save_pretrained of a model with low-bit weights does not write a folder of random ones",
        "weights/swap.py",
        "setattr(owner, way, _refused)",
        "pass",
        ("ways_out",),
    ),
    Mutation(
        "checksums-beside-the-artefact",
        "a tokenizer that was altered is found",
        "hf/checksums.py",
        "if _checksum(folder / name) != expected:",
        "if False:",
        ("folders",),
    ),
    Mutation(
        "code-of-a-folder",
        "code of a folder does not run unless it is trusted",
        "hf/model.py",
        "config = AutoConfig.from_pretrained(str(place), trust_remote_code=trust_remote_code)",
        "config = AutoConfig.from_pretrained(str(place), trust_remote_code=True)",
        ("folders",),
    ),
    Mutation(
        "choices-before-the-length",
        "the number of choices is not taken for the length",
        "hf/model.py",
        'length = inputs["input_ids"].shape[-1]',
        'length = inputs["input_ids"].shape[1]',
        ("folders",),
    ),
    Mutation(
        "written-arguments",
        "what a model writes into the caller's tensor is there after a call",
        "graph/effects.py",
        "            tensor.copy_(value)\n",
        "            pass\n",
        ("effects",),
    ),
    Mutation(
        "containers-of-the-caller",
        "what a model puts into the caller's list is there after a call",
        "graph/effects.py",
        "        value[:] = new\n",
        "        pass\n",
        ("effects",),
    ),
    Mutation(
        "shared-memory-of-arguments",
        "a written argument that shares elements with another one is refused",
        "graph/effects.py",
        "    return any(bool(part.any()) for part in",
        "    return False and any(bool(part.any()) for part in",
        ("effects",),
    ),
    Mutation(
        "samples-before-writes",
        "kept samples are what the model was called with",
        "api/preparation/observed.py",
        "            self.samples.keep(inputs)  # before",
        "            self.samples.batches.append(tuple(inputs))  # before",
        ("effects",),
    ),
    Mutation(
        "valid-offsets",
        "models are tried with offsets that are in order",
        "capture/examples.py",
        "        return resized.sort().values\n",
        "        return resized\n",
        ("calls",),
    ),
    Mutation(
        "padding-of-encoders",
        "torch's encoder gives zeros at padding behind the tokens",
        "capture/export_guards.py",
        "    return output.masked_fill(padding[..., None], 0.0)\n",
        "    return output\n",
        ("calls",),
    ),
    Mutation(
        "sizes-of-other-paths",
        "sizes for which the model takes another path are refused",
        "graph/signature.py",
        "        if self.conditions:\n",
        "        if False:\n",
        ("size_paths",),
    ),
    Mutation(
        "guards-that-do-not-matter",
        "questions about sizes without consequence refuse nothing",
        "capture/capture.py",
        "        return PathsSeen.SAME\n",
        "        return PathsSeen.OTHER\n",
        ("size_paths",),
    ),
    Mutation(
        "sizes-that-operators-need",
        "sizes that do not fit an operator are refused before an engine computes addresses with them",
        "capture/size_paths.py",
        "        elif guard.where or (sizes and seen):",
        "        elif guard.where:",
        ("size_paths",),
    ),
    Mutation(
        "sizes-of-kernels",
        "kernels in C are given no sizes that do not fit",
        "backends/native/operators/linear.py",
        "    check_sizes(x.tensor.shape[-1] == inputs, node, x.tensor.shape, weight.tensor.shape)\n",
        "",
        ("plans",),
    ),
    Mutation(
        "factor-of-a-bias",
        "a constant factor behind a product also holds for its bias",
        "capture/fold_numbers.py",
        "_rounded(bias * factor + term)",
        "_rounded(bias + term)",
        ("factors",),
    ),
    Mutation(
        "term-around-zeros",
        "a number that is added in front of a convolution that pads stays there",
        "capture/fold_numbers.py",
        "not isinstance(padding, str) and not any(padding)",
        "not isinstance(padding, str)",
        ("finished_convolution",),
    ),
    Mutation(
        "term-of-codes",
        "numbers behind an activation are a part of the codes that C code makes",
        "backends/native/plans/code_products.py",
        'a["output_zero_point"] + shift + after.term / scale',
        'a["output_zero_point"] + shift',
        ("finished_convolution",),
    ),
    Mutation(
        "computed-groups",
        "a convolution whose groups are computed from sizes stays in float",
        "capture/naming.py",
        "        if computed := catalogue.computed_options(node):\n",
        "        if computed := []:\n",
        ("odd_sizes",),
    ),
    Mutation(
        "single-second-size",
        "one sequence with its steps first leaves the batch free",
        "capture/capture.py",
        "        if wide is not None and not warning:\n",
        "        if False:\n",
        ("odd_sizes",),
    ),
    Mutation(
        "inverse-permutation",
        "a sum in front of a permutation adds the other side as it lies there",
        "backends/native/factors.py",
        "[dims.index(dim) for dim in range(len(dims))]",
        "dims",
        ("factors",),
    ),
    Mutation(
        "result-in-the-arena",
        "what an operator of torch writes is not overwritten while it is needed",
        "backends/native/plans/recorder.py",
        "                    ref.root.last = index\n",
        "                    ref.root.last = ref.root.first\n",
        ("plans",),
    ),
    Mutation(
        "sizes-of-programs-for-others",
        "a program that asks for no sizes has those fixed for which it would be wrong",
        "api/exports.py",
        "if condition.silent), None)",
        "if False), None)",
        ("size_paths",),
    ),
    Mutation(
        "batch-norm-fold",
        "a captured model computes what the model computes",
        "capture/rewrites.py",
        "new_bias = (shift * factor +",
        "new_bias = (shift +",
        ("capture",),
    ),
    Mutation(
        "causal-mask",
        "attention that is taken apart computes the same",
        "capture/decompose.py",
        "aten.triu.default, lowest, 1)",
        "aten.triu.default, lowest, 2)",
        ("capture",),
    ),
    Mutation(
        "rule-order",
        "of equally specific rules the last one declared wins",
        "planning/matching.py",
        "_can(m, op.kind, row), i)",
        "_can(m, op.kind, row), -i)",
        ("rules",),
    ),
    Mutation(
        "observer-range",
        "ranges cover all calibration batches, not only the last",
        "observers/minmax.py",
        '"high": torch.maximum(state["high"], high)}',
        '"high": high}',
        ("observers",),
    ),
    Mutation(
        "merged-ranges",
        "ranges merged over ranks are those of all the data",
        "observers/minmax.py",
        "high=torch.maximum)",
        "high=torch.minimum)",
        ("observers", "statistics"),
    ),
    Mutation(
        "histogram-coarsening",
        "histograms depend on the values alone, not on batches or their order",
        "numerics/histogram.py",
        'rounding_mode="trunc")',
        'rounding_mode="floor")',
        ("histogram",),
    ),
    Mutation(
        "scale",
        "a symmetric range clips at neither end",
        "numerics/affine.py",
        "amax / min(quant_max - middle",
        "amax / max(quant_max - middle",
        ("numerics",),
    ),
    Mutation(
        "rounding",
        "codes are rounded half to even",
        "numerics/affine.py",
        "(values / scales).round_()",
        "(values / scales).add_(0.5).floor_()",
        ("numerics",),
    ),
    Mutation(
        "channel-axis",
        "transposed convolutions have a scale per output channel",
        "graph/catalogue.py",
        'return 1 if schema_arguments(node)["groups"] == 1 else None',
        "return 0 if groups_of(node) == 1 else None",
        ("qdq",),
    ),
    Mutation(
        "placement",
        "of a residual sum the shortcut is quantized, and the main path fused",
        "graph/placement.py",
        "fused = max(anchors",
        "fused = min(anchors",
        ("qdq",),
    ),
    Mutation(
        "pair-limit",
        "no pair of products overflows 16 bits",
        "numerics/int16_pairs.py",
        "PAIR_LIMIT = 128",
        "PAIR_LIMIT = 129",
        ("int16_pairs", "saturation"),
    ),
    Mutation(
        "pairs-of-positions",
        "two positions of a window are a pair where a group has one input channel",
        "numerics/weights.py",
        "times = 2 if",
        "times = 1 if",
        ("int16_pairs",),
    ),
    Mutation(
        "float-attention-unseen",
        "attention in fp32 gives keys that a mask hides no weight",
        "kernels/c_code/attention.h",
        "unseen, lanes & _mm_test_epi8_mask(some, some), x",
        "unseen, lanes, x",
        ("float_attention",),
    ),
    Mutation(
        "float-attention-repacked",
        "attention in fp32 reads the keys of each head",
        "kernels/c_code/float_attention.c",
        "if (shared != packed) {",
        "if (packed < 0) {",
        ("float_attention",),
    ),
    Mutation(
        "dynamic-attention-weights",
        "codes of probabilities are of what is multiplied with the scales of the values",
        "kernels/c_code/dynamic_attention.c",
        "__m512 x = _mm512_fmadd_ps(_mm512_mul_ps(exact, scale), factor, log);",
        "__m512 x = _mm512_mul_ps(_mm512_mul_ps(exact, scale), factor);",
        ("dynamic_attention",),
    ),
    Mutation(
        "dynamic-attention-repacked",
        "attention in int8 with ranges of each call reads the keys of each head",
        "kernels/c_code/dynamic_attention.c",
        "if (which != packed) {",
        "if (packed < 0) {",
        ("dynamic_attention",),
    ),
    Mutation(
        "dynamic-attention-no-number",
        "what is no number in a row of keys is in the results of all that read it",
        "kernels/c_code/dynamic_attention.c",
        "return _mm512_mask_mov_ps(_mm512_set1_ps(NAN), known, x);",
        "return x;",
        ("dynamic_attention",),
    ),
    Mutation(
        "matmuls-by-rule",
        "a matmul gets ranges of each call only where a rule names it",
        "planning/matching.py",
        '_ONLY_NAMED = frozenset({*CONVOLUTIONS, "matmul"})',
        "_ONLY_NAMED = frozenset({*CONVOLUTIONS})",
        ("rules",),
    ),
    Mutation(
        "ranges-beside-values",
        "probabilities are rounded beside the ranges of the values",
        "graph/qdq.py",
        "beside = right if spec.input(1).granularity == PER_TOKEN else None",
        "beside = None",
        ("dynamic_attention", "qdq"),
    ),
    Mutation(
        "masks-of-others",
        "what multiplies by whether a row is seen stays where that is another mask's",
        "backends/native/operators/mask.py",
        "or _multiplied(reader, node) is not mask:",
        "or _multiplied(reader, node) is None:",
        ("float_attention",),
    ),
    Mutation(
        "bf16-linear-rounding",
        "the sum of a linear in bf16 is rounded before what follows it",
        "kernels/c_code/rows.c",
        "v = near_bf16(_mm512_add_ps(_mm512_castsi512_ps(sum), bias));",
        "v = _mm512_add_ps(_mm512_castsi512_ps(sum), bias);",
        ("bf16_linear",),
    ),
    Mutation(
        "bf16-attention-queries",
        "attention with products in bf16 rounds its queries",
        "kernels/c_code/float_attention.c",
        "            q[r] = rounded;",
        "            (void)rounded;",
        ("bf16", "c_calls"),
    ),
    Mutation(
        "recurrent-input",
        "the first layer reads channels of very different size in fp32",
        "graph/recurrent.py",
        "FLOAT_SHARE = 0.25",
        "FLOAT_SHARE = 0.0",
        ("recurrent",),
    ),
    Mutation(
        "rows-near-half",
        "codes of rows are those of a division, also near half a code",
        "kernels/c_code/rounding.h",
        "#define SURE 0.4999f",
        "#define SURE 0.6f",
        ("row_linear", "dynamic_convolution"),
    ),
    Mutation(
        "rows-zero-point",
        "the product of rounded rows takes their zero points away",
        "kernels/c_code/rows.c",
        "_mm512_mullo_epi32(_mm512_set1_epi32(j->zero_point[row])",
        "_mm512_mullo_epi32(_mm512_set1_epi32(0 * j->zero_point[row])",
        ("row_linear",),
    ),
    Mutation(
        "rows-256-zero-point",
        "the product of rounded rows takes their zero points away, also in 256-bit registers",
        "kernels/c_code/rows_256.h",
        "_mm256_mullo_epi32(_mm256_set1_epi32(j->zero_point[row])",
        "_mm256_mullo_epi32(_mm256_set1_epi32(0 * j->zero_point[row])",
        ("row_linear",),
    ),
    Mutation(
        "chain-piece",
        "results of a piece lie where those of the thread's last piece lay",
        "kernels/c_code/rows.c",
        "all->y + part * all->at_once * row_bytes",
        "all->y",
        ("row_chain",),
    ),
    Mutation(
        "chain-keeps",
        "results of a linear that something else reads are all kept",
        "backends/native/plans/rows.py",
        '"keeps": a["keeps_sum"]',
        '"keeps": False',
        ("row_chain",),
    ),
    Mutation(
        "chain-epsilon",
        "a norm adds its epsilon to the variance",
        "kernels/c_code/row_norm.h",
        "/ (double)n + epsilon)",
        "/ (double)n)",
        ("row_chain",),
    ),
    Mutation(
        "chain-shown",
        "a comparison of kernels sees the results of each linear in a chain",
        "backends/native/plans/rows.py",
        'shown={"keeps": True}',
        "shown=None",
        ("kernel_checks", "row_chain"),
    ),
    Mutation(
        "chain-factors",
        "a profile names what a chain multiplies, so that it counts as int8",
        "backends/native/plans/rows.py",
        "factors=2, first=first",
        "factors=0, first=first",
        ("row_chain",),
    ),
    Mutation(
        "tune-draws",
        "each draw of labels counts in the mean",
        "api/tune/low_bit_noise.py",
        "divisor += sum(part for _, part in losses)",
        "divisor += losses[0][1]",
        ("low_bit_noise",),
    ),
    Mutation(
        "rows-pairs-fit",
        "no weight whose pairs of products overflow 16 bits is multiplied with AVX2",
        "backends/native/plans/rows.py",
        'found.isa == "avx2"',
        'found.isa == "none"',
        ("row_linear",),
    ),
    Mutation(
        "low-bit-rows-few",
        "linears of few rows keep the kernels of few bits, which are faster there",
        "backends/native/low_bit_rows.py",
        "need(rows >= LEAST_ROWS",
        "need(rows >= 0",
        ("low_bit_rows",),
    ),
    Mutation(
        "low-bit-rows-middle",
        "codes of a low-bit weight are taken about the code of 0",
        "backends/native/low_bit_rows.py",
        "torch.uint8) - weight.form.middle)",
        "torch.uint8) - 128)",
        ("low_bit_rows",),
    ),
    Mutation(
        "captured-rounding",
        "models whose low-bit layers round activations are captured, however deep they are",
        "capture/capture.py",
        "    with unrounded(layers):\n",
        "    with unrounded([]):\n",
        ("rounding",),
    ),
    Mutation(
        "low-bit-tie-codes",
        "a low-bit linear may round an input at half a code either way",
        "proof/rounding_bounds.py",
        "if rounds_input(node) and known:",
        "if rounds_input(node) and not known:",
        ("kernel_checks",),
    ),
    Mutation(
        "images-range",
        "the range of images is that of all their parts",
        "kernels/c_code/steps.c",
        "r->ranges[part] = range_of(r->x + begin, n * (part + 1) / parts - begin);",
        "r->ranges[part] = range_of(r->x, part ? 0 : n / parts);",
        ("c_calls", "dynamic_convolution"),
    ),
    Mutation(
        "images-no-number",
        "what is no number stays so behind a convolution and an activation",
        "backends/native/operators/dynamic_convolution.py",
        "    if spoils:\n",
        "    if False:\n",
        ("dynamic_convolution",),
    ),
    Mutation(
        "images-zero-point",
        "a convolution takes the zero point of its images away, unless none of them is negative",
        "backends/native/operators/dynamic_convolution.py",
        "zero_point = view.symmetric or _may_be_negative(view.input)",
        "zero_point = view.symmetric",
        ("dynamic_convolution",),
    ),
    Mutation(
        "images-sum",
        "a convolution adds in place only where nobody reads what it adds to later",
        "backends/native/operators/dynamic_convolution.py",
        "return _is_kernel(value) and reads_at_once and",
        "return _is_kernel(value) or reads_at_once and",
        ("dynamic_convolution",),
    ),
    Mutation(
        "seven-bits",
        "the second input of a matmul takes 7 bits where sums have 16",
        "graph/saturation.py",
        "2 * highest * _largest_size(",
        "highest * _largest_size(",
        ("saturation",),
    ),
    Mutation(
        "native-zero-point",
        "signed activations run on kernels of unsigned ones",
        "backends/rewrites/codes.py",
        "zero_point = old.numbers[1] + _SHIFT",
        "zero_point = old.numbers[1]",
        ("native",),
    ),
    Mutation(
        "native-bias",
        "convolution kernels add the bias",
        "backends/native/fuse.py",
        "arguments = (x.codes, *x.qparams, *w, conv.bias,",
        "arguments = (x.codes, *x.qparams, *w, None,",
        ("native",),
    ),
    Mutation(
        "native-relu",
        "what is fused behind a sum is what a kernel does there",
        "backends/native/regions.py",
        'Activation("hardtanh", (0.0, 6.0))',
        'Activation("hardtanh", (0.0, 5.5))',
        ("native",),
    ),
    Mutation(
        "verification-threshold",
        "an engine that differs from the reference is an error",
        "backends/verify.py",
        "TOLERANCE_DB = 20.0",
        "TOLERANCE_DB = 8.0",
        ("native", "backend_tables", "errors"),
    ),
    Mutation(
        "expected-outputs",
        "a loaded engine gives the outputs that the artefact keeps, or the graph is run",
        "backends/verify.py",
        "if sqnr >= required_db(graph):",
        "if sqnr >= 0.0:",
        ("loading",),
    ),
    Mutation(
        "file-in-use",
        "codes are not read again from a file that was written into",
        "storage/mapped.py",
        "if now.file == self.file and now.state != self.state:",
        "if now.file != self.file:",
        ("loading",),
    ),
    Mutation(
        "auto-order",
        'backend="auto" begins with the engine that was measured to be faster',
        "backends/auto_order.py",
        "found[first], found[second] = race.faster, race.slower",
        "found[first], found[second] = race.slower, race.faster",
        ("auto",),
    ),
    Mutation(
        "engine-of-files",
        "an engine that only writes files is no backend for models",
        "backends/__init__.py",
        "if backend is None or not backend.runs_models:",
        "if backend is None:",
        ("toy_engine",),
    ),
    Mutation(
        "engine-suffix",
        "the name of an exported file ends as its format demands",
        "backends/exporting.py",
        "if exporter.suffix and path.suffix != exporter.suffix:",
        "if False:",
        ("toy_engine",),
    ),
    Mutation(
        "auto",
        'backend="auto" goes on when an engine can not compute the model',
        "backends/__init__.py",
        "except (BackendError, UnsupportedError) as error:",
        "except UnsupportedError as error:",
        ("auto",),
    ),
    Mutation(
        "checksum",
        "a byte changed in an artefact is noticed",
        "storage/folder.py",
        "if expected != got:",
        'if expected["size"] != got["size"]:',
        ("artefact",),
    ),
    Mutation(
        "packed-shapes",
        "packed weights of another size than their format says are not loaded",
        "numerics/packed_weight.py",
        "if found.get(name) != expected.get(name)",
        "if (name in found) != (name in expected)",
        ("weights_artefact",),
    ),
    Mutation(
        "low-bit-ties",
        "tied parameters are one again after load",
        "weights/files/artefact.py",
        "parameters.setdefault(names[name], fresh)",
        "fresh",
        ("weights_artefact",),
    ),
    Mutation(
        "low-bit-graph-rows",
        "a captured low-bit linear takes the kernel for the number of rows of each call",
        "backends/low_bit/graph.py",
        "if 0 < rows <= known[name].max_rows:",
        "if rows:",
        ("low_bit_graphs",),
    ),
    Mutation(
        "awq-clip",
        "AWQ clips the ranges that lose least",
        "numerics/clipping.py",
        "better = lost < least",
        "better = lost < least * 0.9",
        ("clipping",),
    ),
    Mutation(
        "low-bit-ranks",
        "sums over the inputs of low-bit layers are those of all processes",
        "weights/shared_work.py",
        "add(result, group, InputStatistics(tokens,",
        "add({}, group, InputStatistics(tokens,",
        ("low_bit_distributed",),
    ),
    Mutation(
        "two-sided-order",
        "two-sided solvers take the layers of a block one after the other",
        "weights/driver.py",
        "from_first(_stages(inside, inputs), {})",
        "from_first([list(inside)], {})",
        ("weight_only",),
    ),
    Mutation(
        "plan-arena",
        "memory of a plan is used again only when nobody reads it any more",
        "backends/native/plans/arena.py",
        "if other.last < block.first or block.last < other.first:",
        "if other.last <= block.first or block.last < other.first:",
        ("plans",),
    ),
    Mutation(
        "plan-alike",
        "primitives are shared by layers of the same attributes only",
        "kernels/onednn/primitives.py",
        "key = make.__name__, args[1:], tuple(kwargs.items())",
        "key = make.__name__, args[1:-1], tuple(kwargs.items())",
        ("plans",),
    ),
    Mutation(
        "plan-ones",
        "oneDNN is told of no stride of a size of 1 that a tensor without gaps would not have",
        "kernels/onednn/primitives.py",
        "desc = desc.plain(channels_last=channels_last)",
        "desc = desc if not channels_last else desc.plain(channels_last=True)",
        ("descriptions",),
    ),
    Mutation(
        "kernels-that-end-the-process",
        "an AMX kernel that writes past its memory is not made",
        "kernels/onednn/trials.py",
        "    amx = not overruns_with_amx(wanted)\n",
        "    amx = True\n",
        ("trials",),
    ),
    Mutation(
        "trial-noise",
        "a kernel is tried in memory that holds noise, so that it is seen what it does not write",
        "kernels/onednn/trials.py",
        "return bool(((found - values).abs() <= most).all())",
        "return bool(((found - values).abs() <= most).double().mean() > 0.9)",
        ("trials",),
    ),
    Mutation(
        "trial-kinds",
        "kernels of transposed convolutions and of AMX over few channels are tried",
        "kernels/onednn/trials.py",
        "return wanted.geometry.transposed or",
        "return not wanted.geometry.transposed and",
        ("trials",),
    ),
    Mutation(
        "torchs-sums",
        "without a plan, torch's convolutions are tried before they are used",
        "backends/native/tried.py",
        "is_usual = not wanted.source.sizes[0] or",
        "is_usual = True or",
        ("tried",),
    ),
    Mutation(
        "linears-of-nothing",
        "a linear of an empty input keeps the dimensions of its input where torch's kernel does not",
        "backends/native/packing.py",
        "return result if result.dim() == x.dim() else",
        "return result if True else",
        ("tried",),
    ),
    Mutation(
        "plan-waiting",
        "what torch reads while a plan is made is computed",
        "backends/native/plans/recorder.py",
        "if reads_blocks(arguments):",
        "if False:",
        ("plans",),
    ),
    Mutation(
        "plan-constant",
        "a constant that a graph changes in place is made in each call",
        "backends/native/plans/recorder.py",
        " and node not in self._each_time:",
        ":",
        ("one_token",),
    ),
    Mutation(
        "plan-view",
        "a view of an input is read where it lies",
        "backends/native/plans/recorder.py",
        "            return value.root if whole else MemoryPart(value.root, self._offset(value), value.desc)",
        "            return value.root if whole else MemoryPart(value.root, 0, value.desc)",
        ("one_token",),
    ),
    Mutation(
        "codes-rows-left-over",
        "products in C compute every row",
        "kernels/c_code/rows.c",
        "for (; done < rows; done++)",
        "for (; done + 1 < rows; done++)",
        ("code_products",),
    ),
    Mutation(
        "codes-256-rows-left-over",
        "products in C compute every row, also in 256-bit registers",
        "kernels/c_code/rows_256.h",
        "for (; done < rows; done++)",
        "for (; done + 1 < rows; done++)",
        ("code_products",),
    ),
    Mutation(
        "codes-plain",
        "only results between bounds are made without the step to codes",
        "kernels/c_code/rows.c",
        " && how->inverse == 1 &&",
        " &&",
        ("code_products",),
    ),
    Mutation(
        "codes-plain-fp32",
        "results in fp32 have their activation",
        "kernels/c_code/rows.c",
        "return how->activation == ACTIVATION_IDENTITY;",
        "return 1;",
        ("code_products",),
    ),
    Mutation(
        "codes-mask",
        "products in C write no output that a weight is filled up with",
        "kernels/c_code/rows.c",
        "left > 0 ? (__mmask16)((1 << left) - 1) : 0;",
        "0xffff;",
        ("code_products",),
    ),
    Mutation(
        "codes-init",
        "sums in registers begin with the share of the zero point",
        "kernels/c_code/rows.c",
        "_mm512_loadu_si512(j->sums + (panel + p) * TILE)",
        "_mm512_setzero_si512()",
        ("code_products",),
    ),
    Mutation(
        "codes-256-init",
        "sums in 256-bit registers begin with the share of the zero point",
        "kernels/c_code/rows_256.h",
        "j->codes ? j->sums + panel * TILE : NULL;",
        "NULL;",
        ("code_products",),
    ),
    Mutation(
        "codes-block-init",
        "sums of blocks get the share of the zero point",
        "kernels/c_code/rows.c",
        "init = _mm512_loadu_si512(j->sums + column)",
        "init = _mm512_setzero_si512()",
        ("code_products",),
    ),
    Mutation(
        "codes-sign",
        "products in C give int8 codes where these are asked for",
        "kernels/c_code/rows.c",
        "(char)0x80 : 0",
        "(char)0x00 : 0",
        ("code_products",),
    ),
    Mutation(
        "codes-256-sign",
        "products in C give int8 codes where these are asked for, also in 256-bit registers",
        "kernels/c_code/finish_256.h",
        "? (int64_t)0x8080808080808080 : 0",
        "? (int64_t)0x8080808080808000 : 0",
        ("code_products", "depthwise"),
    ),
    Mutation(
        "codes-256-largest",
        "results above the range get the largest code",
        "kernels/c_code/finish_256.h",
        "_mm256_min_ps(_mm256_set1_ps(255.0f), ",
        "_mm256_min_ps(_mm256_set1_ps(1e30f), ",
        ("code_products", "depthwise"),
    ),
    Mutation(
        "codes-largest",
        "results above the range get the largest code, also in 512-bit registers",
        "kernels/c_code/rows.c",
        "_mm512_min_ps(_mm512_set1_ps(255.0f), _mm512_fmadd_ps",
        "_mm512_min_ps(_mm512_set1_ps(1e30f), _mm512_fmadd_ps",
        ("code_products",),
    ),
    Mutation(
        "codes-behind-tiles",
        "tiles read nothing behind the last row of codes",
        "kernels/c_code/rows.c",
        "in_memory = j->codes ? rows : 2 * TILE;",
        "in_memory = 2 * TILE;",
        ("code_products",),
    ),
    Mutation(
        "codes-threads",
        "products with a small weight are shared by threads where there are many rows",
        "kernels/c_code/rows.c",
        "weights * j->rows / (8 * WORK_PER_THREAD)",
        "weights / (8 * WORK_PER_THREAD) * j->rows",
        ("in_turn",),
    ),
    Mutation(
        "codes-zero-point",
        "products in C take the zero point of what they read away",
        "backends/native/plans/code_products.py",
        'sums * -a["x_zero_point"]',
        "sums * 0",
        ("code_products",),
    ),
    Mutation(
        "codes-seven-bits",
        "a linear gives a product of activations no codes beyond its 7 bits",
        "backends/native/regions.py",
        '"hardtanh", tuple((limit - narrow',
        '"none", tuple((limit - narrow',
        ("code_products",),
    ),
    Mutation(
        "depthwise-border",
        "what a depthwise window sees beside the image is zero",
        "kernels/c_code/depthwise.c",
        "seen ? job->x +",
        "1 ? job->x +",
        ("depthwise",),
    ),
    Mutation(
        "depthwise-in-place-twice",
        "channels that are computed twice are added once",
        "backends/native/operators/depthwise.py",
        " and not (in_place and outputs % _PANEL)",
        "",
        ("depthwise",),
    ),
    Mutation(
        "attention-zero-point",
        "attention in C takes the zero point of the values away",
        "kernels/c_code/attention.c",
        "(int)(job->how->v_zero_point * total[r])",
        "0",
        ("int8_attention",),
    ),
    Mutation(
        "attention-rest",
        "attention in C computes the rows that are left over",
        "kernels/c_code/attention.c",
        "for (; row < end; row++)",
        "for (; row + 1 < end; row++)",
        ("int8_attention",),
    ),
    Mutation(
        "attention-repacked",
        "attention in C reads the keys of each head",
        "kernels/c_code/attention.c",
        "if (which != packed) {",
        "if (packed < 0) {",
        ("int8_attention",),
    ),
    Mutation(
        "attention-in-place",
        "attention is not computed later than something that changes what it reads",
        "backends/native/operators/int8_attention.py",
        "need(not works_in_place(between), ",
        "need(True, ",
        ("int8_attention",),
    ),
    Mutation(
        "norm-in-place",
        "a norm in single operators that something changes meanwhile stays",
        "backends/native/operators/norm.py",
        "need(not any(map(works_in_place, meanwhile)), ",
        "need(True, ",
        ("norm",),
    ),
    Mutation(
        "norm-variance",
        "only the variance without Bessel's correction makes a layer norm",
        "backends/native/operators/norm.py",
        'return a.get("correction") == 0 or a.get("unbiased") is False',
        "return True",
        ("norm",),
    ),
    Mutation(
        "norm-readers",
        "a norm whose parts are read elsewhere stays",
        "backends/native/operators/norm.py",
        "need(readers <= inner, ",
        "need(True, ",
        ("norm",),
    ),
    Mutation(
        "step-heads",
        "heads that share keys read the right ones",
        "kernels/c_code/steps.c",
        "shared = head / h->group;",
        "shared = head % (h->heads / h->group);",
        ("one_token",),
    ),
    Mutation(
        "rotary-sign",
        "the second half of a head is subtracted",
        "kernels/c_code/steps.c",
        "x[n] * cosine[n] - x[half + n] * sine[n];",
        "x[n] * cosine[n] + x[half + n] * sine[n];",
        ("rotary",),
    ),
    Mutation(
        "rotary-halves",
        "only the second half of the same tensor is negated",
        "backends/native/operators/rotary.py",
        " or _half(second, 1) is not x",
        "",
        ("rotary",),
    ),
    Mutation(
        "mask-readers",
        "who sees a mask gets one of its own, written out",
        "backends/native/operators/mask.py",
        "user.target in _READERS\n",
        "True\n",
        ("mask",),
    ),
    Mutation(
        "mask-constants",
        "a constant that hides something stays in a mask",
        "backends/native/operators/mask.py",
        "not recorder.follow and mask.tensor.all() and",
        "not recorder.follow and",
        ("mask",),
    ),
    Mutation(
        "mask-positions",
        "only positions in even steps are a view",
        "backends/native/operators/mask.py",
        "need(torch.equal(even, index), ",
        "need(True, ",
        ("mask",),
    ),
    Mutation(
        "mask-index",
        "an index out of range does not count as sizes without a plan",
        "kernels/c_code/calls.py",
        "if status == failures.INDEX and function.row.index:",
        "if False:",
        ("mask",),
    ),
    Mutation(
        "whole-teams",
        "functions in C leave the threads as they are",
        "kernels/c_code/openmp.h",
        "gomp_parallel(each_part, &all, (unsigned)threads, 0);",
        "gomp_parallel(each_part, &all, (unsigned)all.parts, 0);",
        ("teams",),
    ),
    Mutation(
        "step-place",
        "an index that is no place is an error",
        "kernels/c_code/steps.c",
        "if (place < 0 || place >= how->places) {",
        "if (0) {",
        ("one_token",),
    ),
    Mutation(
        "other-threads",
        "functions in C divide their work among as many threads as a plan is made for",
        "backends/native/plans/recorder.py",
        "openmp.threads() if threads is None else threads",
        "openmp.threads()",
        ("in_turn",),
    ),
    Mutation(
        "recording-ends",
        "what a plan was recorded with goes at once",
        "backends/native/plans/recorder.py",
        "self._waiting.clear()  # they refer to this, and to all that was computed",
        "",
        ("plans",),
    ),
    Mutation(
        "each-part",
        "each part of a division has its own time",
        "kernels/c_code/openmp.h",
        "turns->each[region][part < MOST_PARTS ? part : MOST_PARTS - 1] += taken;",
        "turns->each[region][0] += taken;",
        ("in_turn",),
    ),
    Mutation(
        "token-proof",
        "a plan that computes other tokens than the model is not used",
        "api/generation/decoder.py",
        "if not found >= required:",
        "if False:",
        ("generation",),
    ),
    Mutation(
        "token-memory",
        "a cache that was changed is read again",
        "api/generation/memory.py",
        "layer.keys is k and layer.values is v for",
        "True for",
        ("generation",),
    ),
    Mutation(
        "token-weights",
        "tokens follow weights that were loaded",
        "api/generation/decoder.py",
        "if not self._of.is_of(model):",
        "if False:",
        ("generation",),
    ),
    Mutation(
        "plan-results",
        "what a planned call returns is no memory of the plan",
        "backends/native/plans/recorder.py",
        "value.root.returned = True",
        "value.root.returned = False",
        ("plans",),
    ),
    Mutation(
        "plan-values",
        "what depends on values of the inputs is not planned",
        "backends/native/plans/recorder.py",
        'return any(tag in getattr(target, "tags", ()) for',
        'return all(tag in getattr(target, "tags", ()) for',
        ("plans",),
    ),
    Mutation(
        "plan-sizes",
        "a plan is made for one set of input sizes",
        "backends/native/planned.py",
        "((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)",
        "((tensor.dim(), tensor.dtype) for tensor in inputs)",
        ("plans",),
    ),
    Mutation(
        "neural-compressor-bits",
        "Neural Compressor's `bits` reaches the codes",
        "config/neural_compressor.py",
        'return f"int{bits}"',
        'return "int4"',
        ("neural_compressor_configs",),
    ),
    Mutation(
        "signature",
        "inputs of another size than captured are refused",
        "graph/signature.py",
        "if size != expected:",
        "if size > expected:",
        ("signature",),
    ),
    Mutation(
        "column-rounding-order",
        "columns of the largest inputs are rounded first, and codes go back to their places",
        "numerics/column_rounding.py",
        "return torch.empty_like(codes).scatter_(1, rows, codes).transpose(1, 2)",
        "return codes.transpose(1, 2)",
        ("column_rounding",),
    ),
    Mutation(
        "column-rounding-blocks",
        "the second half of the columns takes over the errors of the first one",
        "numerics/column_rounding.py",
        "current[:, middle:end].baddbmm_(",
        "current[:, middle:end].clone().baddbmm_(",
        ("column_rounding",),
    ),
    Mutation(
        "weight-rounding-harm",
        "codes that make the model's outputs worse are taken back",
        "algorithms/judged.py",
        "if not is_worse(least, found):",
        "if found:",
        ("weight_rounding",),
    ),
    Mutation(
        "channel-scaling-clip",
        "channels that reach a clip are not scaled",
        "algorithms/channel_scaling.py",
        "** power, limits.clamp(min=1))",
        "** power, limits.clamp(min=1e9))",
        ("channel_scaling",),
    ),
    Mutation(
        "channel-scaling-sums",
        "both sides of a sum have the same scale",
        "algorithms/channel_scaling.py",
        "return sides if alike else None",
        "return sides[:1] if alike else None",
        ("channel_scaling",),
    ),
    Mutation(
        "sensitivity-rows",
        "samples of a batch are draws of their own",
        "calibration/sensitivity.py",
        "each = rows.sum(1) * max(size, _LEAST_SIZE)",
        "each = rows * max(size, _LEAST_SIZE)",
        ("sensitivity",),
    ),
    Mutation(
        "auto-held-out",
        "nothing is computed from data that is judged by",
        "api/auto/held_out.py",
        "return Split(_part(batch, 0, first), held, whole)",
        "return Split(batch, held, whole)",
        ("prepared_auto",),
    ),
    Mutation(
        "auto-floor",
        "below the least accuracy operators go to float, whatever is known of times",
        "api/auto/prepared.py",
        "while floor is not None and best.sqnr_db < floor:",
        "while False:",
        ("prepared_auto",),
    ),
    Mutation(
        "auto-any-exception",
        "a candidate that fails by any exception is passed over",
        "api/auto/prepared.py",
        "except Exception as error:  # a defect in one candidate is no reason to deliver none",
        "except NCError as error:",
        ("failures",),
    ),
    Mutation(
        "auto-unknown-times",
        "unknown times keep no bad operator",
        "api/auto/prepared.py",
        "if lost is None or lost <= limit:",
        "if lost is not None and lost <= limit:",
        ("prepared_auto",),
    ),
    Mutation(
        "auto-most-lost",
        "the time that may be lost for accuracy rises with the error",
        "api/auto/choice.py",
        "return MOST_LOST + LOST_FOR_EACH_DB * max(0.0, ENOUGH_DB - sqnr_db)",
        "return MOST_LOST",
        ("choice",),
    ),
    Mutation(
        "auto-not-held-out",
        "errors on data that ranges were fitted to choose no static ranges",
        "api/auto/choice.py",
        "    if not held_out:\n        fewest",
        "    if held_out is None:\n        fewest",
        ("choice", "prepared_auto"),
    ),
    Mutation(
        "auto-held-out-whole",
        "something is held out of two batches whose rows depend on one another",
        "api/auto/held_out.py",
        "            return self._calls > 1\n",
        "            return False\n",
        ("prepared_auto",),
    ),
    Mutation(
        "verdict-of-all-batches",
        "one batch of silence is no verdict on accuracy",
        "calibration/accuracy.py",
        "batches, step = batches[::2], 2 * step",
        "batches = batches[:KEPT]",
        ("accuracy",),
    ),
    Mutation(
        "sensitivity-size",
        "shares of the error do not depend on the size of the outputs",
        "calibration/sensitivity.py",
        "(2 * signs - 1).to(output.dtype) * (1.0 / max(size, _LEAST_SIZE)),",
        "(2 * signs - 1).to(output.dtype) * (1.0 / max(size, 1.0)),",
        ("sensitivity",),
    ),
    Mutation(
        "autotune-once",
        "a configuration for which run_fn has no data left is named",
        "api/tune/autotune.py",
        "if self._calls and not counts:",
        "if False:",
        ("autotune",),
    ),
    Mutation(
        "auto-error",
        "a fast configuration with a large error is not taken",
        "api/auto/choice.py",
        "return [index for index in possible if trials[index].error <= factor * least], factor",
        "return list(possible), factor",
        ("choice",),
    ),
    Mutation(
        "auto-busy",
        "times of a busy machine decide nothing",
        "api/auto/choice.py",
        "if doubt or len(times) < len(near):",
        "if len(times) < len(near):",
        ("choice", "prepared_auto"),
    ),
    Mutation(
        "check-noise",
        "an artefact fails only where the whole interval does",
        "cli/gate.py",
        "self.drop_interval[0] > max_drop",
        "self.drop_interval[1] > max_drop",
        ("check",),
    ),
    Mutation(
        "check-exit",
        "an artefact that does not pass ends the command with 1",
        "cli/check.py",
        "        sys.exit(_CODES[outcome])",
        "        sys.exit(0)",
        ("check",),
    ),
    Mutation(
        "check-finite",
        "a limit that nothing misses is an error",
        "cli/check.py",
        "not (0 <= value < math.inf)",
        "not value >= 0 and value == value",
        ("check",),
    ),
    Mutation(
        "check-users-code",
        "code of the user's does not choose the exit code",
        "cli/inputs.py",
        "    except BaseException as error:",
        "    except Exception as error:",
        ("check",),
    ),
    Mutation(
        "check-undecided",
        "an interval that is too wide to decide is said",
        "cli/gate.py",
        "high > MOST_SPREAD * low",
        "high > 1000 * low",
        ("check",),
    ),
    Mutation(
        "plain-text",
        "nothing in a name steers a terminal",
        "text/plain.py",
        "found = _UNSAFE.sub(lambda match: _escape(match[0]), str(text))",
        "found = str(text)",
        ("plain",),
    ),
    Mutation(
        "tune-hull",
        "a front has the cheapest moves first",
        "api/tune/solve.py",
        "    for _, group, i in moves:",
        "    for _, group, i in reversed(moves):",
        ("solve",),
    ),
    Mutation(
        "tune-attention",
        "both products of an attention are one decision",
        "api/tune/groups.py",
        '            if first is not None and kind_of_node(first) == "matmul":',
        "            if False:",
        ("groups",),
    ),
    Mutation(
        "tune-key",
        "a trial of another configuration is another trial",
        "api/tune/run.py",
        '"config": plain_or_described(config)}',
        '"config": ""}',
        ("tune",),
    ),
    Mutation(
        "tune-metric",
        "a trial of another metric is another trial",
        "api/tune/identity.py",
        '"metric": metric,',
        '"metric": "",',
        ("tune",),
    ),
    Mutation(
        "tune-globals",
        "a metric whose globals changed is another metric",
        "api/tune/described.py",
        "            if name in function.__globals__:",
        "            if name not in function.__globals__:",
        ("described", "tune"),
    ),
    Mutation(
        "tune-untold",
        "what can't be told apart is not kept",
        "api/tune/described.py",
        "        if not _has_c_state(kind):",
        "        if True:",
        ("described",),
    ),
    Mutation(
        "tune-arrays",
        "arrays count by their bytes",
        "api/tune/described.py",
        "hashlib.sha256(np.ascontiguousarray(plain_array).tobytes()).digest()",
        'b""',
        ("described",),
    ),
    Mutation(
        "tune-busy",
        "a time that was disturbed does not win without a word",
        "api/tune/front.py",
        "min(certain_first(found) if timed else found, key=rank)",
        "min(found, key=rank)",
        ("uncertain_times",),
    ),
    Mutation(
        "tune-rounds",
        "how many times as fast is the median of the rounds' ratios",
        "api/tune/measure.py",
        "fp32 / statistics.median(ratios)",
        "median(rounds).get(_QUANTIZED, fp32)",
        ("uncertain_times",),
    ),
    Mutation(
        "tune-drop",
        "what is lost is counted from fp32",
        "api/tune/run.py",
        "drop = self.points[0].metric - result.metric if self.points else 0.0",
        "drop = self.points[-1].metric - result.metric if self.points else 0.0",
        ("tune",),
    ),
    Mutation(
        "auto-verified",
        "what auto delivers is compared with the reference",
        "api/auto/prepared.py",
        'asked = dataclasses.replace(asked, guard="undo", judged=self.few_rows(), judged_by=by)',
        'asked = dataclasses.replace(asked, guard="undo", judged=self.few_rows(), judged_by=by, verify="off")',
        ("prepared_auto",),
    ),
    Mutation(
        "guard-whole",
        "what is left without the slow operators has to be faster as a whole",
        "api/preparation/guard.py",
        "if _ratio(other) > _ratio(best):",
        "if _ratio(other) > 0:",
        ("guard",),
    ),
    Mutation(
        "guard-doubt",
        "in doubt nothing is undone",
        "api/preparation/guard.py",
        "return verdict.ratio if verdict is not None and verdict.certain else 0.0",
        "return verdict.ratio if verdict is not None else 0.0",
        ("guard",),
    ),
    Mutation(
        "no-bound-times-0",
        "what has no bound has none behind a weight of 0",
        "proof/rounding_bounds.py",
        "return torch.nan_to_num(slack, nan=torch.inf, posinf=torch.inf)",
        "return slack",
        ("kernel_checks",),
    ),
    Mutation(
        "auto-good",
        "from 40 dB on twice the least error is allowed",
        "api/auto/choice.py",
        "    if least <= GOOD:",
        "    if least < 0:",
        ("choice",),
    ),
    Mutation(
        "auto-same-time",
        "of trials that are as fast the one with the least error is taken",
        "api/auto/choice.py",
        "if ms <= SAME_TIME * min(times.values())]",
        "if ms <= min(times.values())]",
        ("choice",),
    ),
    Mutation(
        "known-codes-hold",
        "a weight with known codes stays alive, or another one gets its id",
        "graph/known_codes.py",
        "self._found[key] = weight, quantize_weight(weight, spec, axis, groups)",
        "self._found[key] = None, quantize_weight(weight, spec, axis, groups)",
        ("known_codes",),
    ),
    Mutation(
        "mending-kinds",
        "only static linears get ranges per row",
        "api/auto/mending.py",
        'if d.operator in worst and d.spec.mode == "static"]',
        "if d.operator in worst]",
        ("mending",),
    ),
    Mutation(
        "mending-pays",
        "a way to mend operators that lowers the error too little is not taken",
        "api/auto/prepared.py",
        "if mended is None or again.error * LEAST_MENDED > trial.error:",
        "if mended is None:",
        ("prepared_auto", "mending"),
    ),
    Mutation(
        "weight-rounding-pairs",
        "rounding keeps the sums of pairs within 16 bits",
        "numerics/column_rounding.py",
        "code = torch.where(code * partner > 0, code.clamp(-room, room), code)",
        "code = torch.where(code * partner < 0, code.clamp(-room, room), code)",
        ("column_rounding", "weight_rounding"),
    ),
    Mutation(
        "weight-rounding-alone",
        "rounding keeps a code within the limit of its pair, also where it is its own partner",
        "numerics/column_rounding.py",
        "low, high = max(low, -pairs.limit), min(high, pairs.limit)",
        "pass",
        ("column_rounding", "weight_rounding"),
    ),
    Mutation(
        "verdict",
        "operators that cost more than they gain are named, others not",
        "backends/profiling/verdict.py",
        "> max(least, _TENTH * c.fp32_ms)",
        "> min(least, _TENTH * c.fp32_ms)",
        ("verdict",),
    ),
    Mutation(
        "verdict-doubt",
        "a busy machine gives no verdict",
        "backends/profiling/latency.py",
        "    if load.disturbed():\n        return load.disturbed()\n",
        "",
        ("verdict",),
    ),
    Mutation(
        "verdict-rounds",
        "the ratio is the median of the rounds' own ratios",
        "backends/profiling/latency.py",
        "ratio=statistics.median(ratios)",
        "ratio=statistics.mean(ratios)",
        ("verdict",),
    ),
    Mutation(
        "low-bit-verdict",
        "low-bit layers that are slower than float ones are called so",
        "api/weight_verdict.py",
        "self.ratio < 1 / _MARGIN",
        "self.ratio > _MARGIN",
        ("low_bit_verdict",),
    ),
    Mutation(
        "report-count",
        "the report counts as int8 what ran int8",
        "api/report.py",
        'sum(op.asked == "int8" and op.ran == "int8" for',
        'sum(op.asked == "int8" for',
        ("reference",),
    ),
    Mutation(
        "dynamic",
        "dynamic ranges are per token where that is asked",
        "numerics/dynamic.py",
        "if per_token else",
        "if per_token and x.dim() > 2 else",
        ("dynamic",),
    ),
    Mutation(
        "smooth-quant",
        "SmoothQuant's scales are those of the paper's equation 4",
        "numerics/smoothing.py",
        "x**alpha / w ** (1 - alpha)",
        "x**alpha / w**alpha",
        ("smooth_quant",),
    ),
    Mutation(
        "bias-correction",
        "bias correction removes the mean error",
        "algorithms/bias_correction.py",
        "delta = found.delta.float()",
        "delta = found.delta.float() * 0.5",
        ("qdq",),
    ),
    Mutation(
        "bias-correction-readers",
        "a correction stays only where what reads it gets no worse",
        "algorithms/judged.py",
        "return any(a > TOLERANCE * b for b, a in pairs)",
        "return False",
        ("bias_correction",),
    ),
    Mutation(
        "bias-correction-held-out",
        "a mean error is judged by samples that it was not computed from",
        "numerics/mean_error.py",
        "others = (total - sums) / (whole - sizes)[:, None]",
        "others = (total / whole).expand_as(sums)",
        ("bias_correction",),
    ),
    Mutation(
        "command-line",
        "positional arrays reach the model in their order",
        "cli/inputs.py",
        'sorted(tensors, key=lambda name: int(name.removeprefix("arr_")))',
        "sorted(tensors, reverse=True)",
        ("cli",),
    ),
    Mutation(
        "ipex-workaround",
        "patterns that IPEX computes wrongly are rewritten",
        "backends/ipex/workarounds.py",
        "weight[1] % 16 != 0)",
        "weight[1] % 8 != 0)",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "ipex-steps-over",
        "convolutions that step over values get no dimension more",
        "backends/ipex/workarounds.py",
        "        if _steps_over_values(conv):\n",
        "        if False:\n",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "ipex-windows-of-groups",
        "windows of groups with many outputs are rewritten",
        "backends/ipex/workarounds.py",
        "is_wide or of_groups or",
        "is_wide or",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "ends-of-few-places",
        "the last row of new sizes is among the places that are compared",
        "proof/few_places.py",
        "    return torch.tensor(sorted(ends | between), dtype=torch.int64)\n",
        "    return torch.tensor(sorted(between), dtype=torch.int64)\n",
        ("places", "kernel_checks"),
    ),
    Mutation(
        "padding-of-places",
        "places beyond the edge of a picture are zeros",
        "proof/places.py",
        "x = x.index_fill(dim, outside.nonzero().flatten(), 0.0)",
        "pass",
        ("places",),
    ),
    Mutation(
        "classes-of-sizes",
        "sizes with another rest of the last block are compared anew",
        "backends/native/plans/proven.py",
        "            if kernel.of_sizes not in classes or kernel.of_operator not in self._of_operator:\n",
        "            if kernel.of_operator not in self._of_operator:\n",
        ("kernel_checks",),
    ),
    Mutation(
        "numbers-of-operators",
        "an operator that is given other numbers for new sizes is compared anew",
        "backends/native/plans/proven.py",
        "            if kernel.of_sizes not in classes or kernel.of_operator not in self._of_operator:\n",
        "            if kernel.of_sizes not in classes:\n",
        ("kernel_checks",),
    ),
    Mutation(
        "last-sample-of-new-sizes",
        "the last sample of a batch of new sizes is compared where an engine shows no inner values",
        "backends/new_sizes.py",
        "torch.tensor([0, count - 1], dtype=torch.int64",
        "torch.tensor([0, 1], dtype=torch.int64",
        ("new_sizes",),
    ),
    Mutation(
        "new-sizes-of-outputs",
        "engines that show no inner values are compared for new sizes",
        "backends/new_sizes.py",
        "return self._run(inputs) if known else self._of_graph(inputs)",
        "return self._run(inputs)",
        ("new_sizes",),
    ),
    Mutation(
        "ipex-proof",
        "what the report calls int8 reads codes in the executed graph",
        "backends/ipex/executed_graph.py",
        "return (inside and _reads_codes(node)) or",
        "return inside or",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "expert-index",
        "each expert is multiplied with its own weight",
        "weights/experts.py",
        "self.get_submodule(str(int(index)))",
        "self.get_submodule(str(int(index) // 2))",
        ("experts",),
    ),
    Mutation(
        "expert-missing",
        "files must hold all experts; else the others move up",
        "weights/files/transformers_files.py",
        "if by_expert and set(counts.values()) != {shape[0]}:",
        "if False:",
        ("experts",),
    ),
    Mutation(
        "expert-order",
        "gate before up, as the model has them in one weight",
        "weights/files/transformers_files.py",
        "for pattern in converter.source_patterns])",
        "for pattern in reversed(converter.source_patterns)])",
        ("experts",),
    ),
    Mutation(
        "file-buffers",
        "buffers get the values of the files",
        "weights/files/streamed.py",
        "else value.read()",
        "else tensor",
        ("pretrained",),
    ),
    Mutation(
        "large-pages-overlap",
        "tensors that share a piece of memory do not overlap",
        "backends/low_bit/large_pages.py",
        "self._used += -(-size // _ALIGNMENT) * _ALIGNMENT",
        "self._used += size // _ALIGNMENT * _ALIGNMENT",
        ("large_pages",),
    ),
    Mutation(
        "given-up-weights",
        "nothing is left of a way of computing a node that was given up",
        "backends/native/plans/recorder.py",
        "        self.weights.give_up(state.weights)\n",
        "",
        ("plans",),
    ),
    Mutation(
        "given-up-calls",
        "calls that wait are made once, also where a way was given up meanwhile",
        "backends/native/plans/recorder.py",
        "if self._times_made == state.times_made:",
        "if True:",
        ("plans",),
    ),
    Mutation(
        "one-recording",
        "threads that want the same new sizes record them once",
        "backends/native/planned.py",
        "            with self._recording:\n",
        "            if True:\n",
        ("plans",),
    ),
    Mutation(
        "compiled-sets",
        "instruction sets that were not compiled are not chosen",
        "backends/low_bit/compiled.py",
        "if name in compiled and not cpu.code_lacks(ISAS[name]))",
        "if not cpu.code_lacks(ISAS[name]))",
        ("c_build",),
    ),
    Mutation(
        "kept-by-others",
        "code that others could have put into the cache is not run",
        "process/cache.py",
        "        _check_own(os.fstat(parent), directory)\n",
        "",
        ("c_build",),
    ),
    Mutation(
        "code-of-other-sources",
        "a library of other sources is not run",
        "kernels/c_code/build.py",
        "    if of is None or of() != identity.encode():\n",
        "    if False:\n",
        ("c_build",),
    ),
    Mutation(
        "addresses-in-code",
        "no address is called that holds no instructions",
        "kernels/onednn/elf.py",
        "    if outside := _outside(library, code, known):\n",
        "    if outside := 0:\n",
        ("plans",),
    ),
    Mutation(
        "dtypes-in-c",
        "a dtype that a function in C does not know is an error",
        "kernels/c_code/steps.c",
        "        EXPECT(t ? is_read(how->dtypes[t]) : is_written(how->dtypes[t]), OTHER_DTYPE);\n",
        "        continue;\n",
        ("c_calls",),
    ),
    Mutation(
        "one-row-panels",
        "one row is multiplied with all outputs",
        "kernels/c_code/low_bit.c",
        "            for (; p < stop; p++)                                              \\\n                "
        "tile(j, p, 0, 1, 1, bits);",
        "            for (; p + 1 < stop; p++)                                          \\\n                "
        "tile(j, p, 0, 1, 1, bits);",
        ("low_bit_c",),
    ),
    Mutation(
        "wrong-kernels",
        "a wrong kernel is an error, whatever the outputs say",
        "proof/kernels.py",
        "    wrong = largest > MOST_QUANTA or mean > MOST_QUANTA_ON_THE_MEAN\n",
        "    wrong = False\n",
        ("kernel_checks",),
    ),
    Mutation(
        "wrong-on-the-mean",
        "a kernel whose codes are all a little off is wrong",
        "proof/kernels.py",
        "    wrong = largest > MOST_QUANTA or mean > MOST_QUANTA_ON_THE_MEAN\n",
        "    wrong = largest > MOST_QUANTA\n",
        ("kernel_checks",),
    ),
    Mutation(
        "plans-for-new-sizes",
        "plans for new sizes are compared",
        "backends/native/plans/checks.py",
        "        if judge is None or (not is_first and not judge.new_sizes):\n",
        "        if judge is None or not is_first:\n",
        ("kernel_checks",),
    ),
    Mutation(
        "wrong-sizes-are-known",
        "a plan that was found wrong is not taken when it is made again",
        "backends/native/plans/checks.py",
        "            return self._known[key], None\n",
        '            return "", None\n',
        ("kernel_checks",),
    ),
    Mutation(
        "stale-weights",
        "a weight that hooks or parametrizations compute is quantized as it is computed, not as it was",
        "algorithms/inputs/computed.py",
        "        if is_computed(module):\n",
        "        if False:\n",
        ("computed_weights",),
    ),
    Mutation(
        "masks-with-gaps",
        "masks that are expanded or sliced are added as they are",
        "backends/ipex/layout.py",
        "    for node, source in found:\n",
        "    for node, source in []:\n",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "inner-batches",
        "products whose second side has its batch within run in int8",
        "backends/ipex/layout.py",
        "value.dim() == 3 and",
        "value.dim() == 9 and",
        ("ipex",),
        ipex=True,
    ),
    Mutation(
        "steps-of-the-example",
        "recurrent layers take any number of steps",
        "capture/export_guards.py",
        "        stack.enter_context(AnyNumberOfSteps())\n",
        "",
        ("recurrent",),
    ),
    Mutation(
        "one-range-for-all-rows",
        "a row of a recurrent layer depends on no other row",
        "numerics/recurrent.py",
        "(values, per_token, quant_min",
        "(values, False, quant_min",
        ("recurrent", "ops"),
    ),
    Mutation(
        "rows-of-a-block",
        "each row of a recurrent layer has its own range in C",
        "kernels/c_code/recurrent.c",
        "values_of(m, s->sums + r * width, ranges[r],",
        "values_of(m, s->sums + r * width, ranges[0],",
        ("recurrent",),
    ),
    Mutation(
        "not-finite-rows",
        "what is not finite stays NaN in its row of a recurrent layer",
        "kernels/c_code/recurrent.c",
        "    if (!range.finite)\n",
        "    if (0)\n",
        ("recurrent",),
    ),
    Mutation(
        "inaccurate-operators",
        "a dynamic operator whose own result is noise stays fp32",
        "api/preparation/captured.py",
        "            if db >= LEAST_DB:\n",
        "            if db >= -LEAST_DB:\n",
        ("recurrent",),
    ),
    Mutation(
        "rows-that-share-a-range",
        "health says that rows which share a range depend on each other",
        "calibration/diagnostics.py",
        "spec.input(0).granularity == PER_TENSOR",
        "spec.input(0).granularity != PER_TENSOR",
        ("recurrent", "dynamic"),
    ),
    Mutation(
        "parts-of-bf16-left-out",
        "AMX multiplies all parts of weights and activations that fp32 sums would keep",
        "kernels/c_code/low_bit_blocks_amx.h",
        "if (i + part >= MOST_PARTS)",
        "if (i + part >= MOST_PARTS - 1)",
        ("low_bit_blocks_c",),
        emulated="amx",
    ),
    Mutation(
        "rows-of-the-lower-tile",
        "each tile of AMX has rows of its own",
        "kernels/c_code/rows.c",
        "_tile_loadd(5, lower + i * of->block, apart);",
        "_tile_loadd(5, x + i * of->block, apart);",
        ("row_linear",),
        emulated="amx",
    ),
    Mutation(
        "weights-of-the-other-panel",
        "each panel of VNNI has weights of its own",
        "kernels/c_code/rows.c",
        "add_products(sum[r][1], codes, w1, kind",
        "add_products(sum[r][1], codes, w0, kind",
        ("row_linear",),
        emulated="avx512_vnni",
    ),
    Mutation(
        "a-key-too-many",
        "AVX-512 sees the keys that are left, and no other",
        "kernels/c_code/attention.h",
        "(1 << left) - 1 : 0);",
        "(2 << left) - 1 : 0);",
        ("float_attention",),
        emulated="avx512",
    ),
    Mutation(
        "nan-of-e4m3-is-a-number",
        "a weight in FP8 that is NaN gives NaN",
        "backends/low_bit/compiled_blocks.py",
        "if code.kind == E4M3:",
        "if code.kind == E5M2:",
        ("low_bit_blocks_c",),
    ),
    Mutation(
        "blocks-use-the-oldest-instructions",
        "low-bit blocks use the best instruction set that there is",
        "backends/low_bit/compiled_blocks.py",
        "for name in compiled.of_this_cpu(code.isas) if",
        "for name in reversed(compiled.of_this_cpu(code.isas)) if",
        ("low_bit_blocks_c",),
    ),
    Mutation(
        "sums-of-groups-shared",
        "each row has its own sums of groups",
        "kernels/c_code/low_bit_blocks.c",
        "j->sums[m * w->groups + g] = sum;",
        "j->sums[g] = sum;",
        ("low_bit_blocks_c",),
    ),
)


def mutate(folder: Path, mutation: Mutation) -> str:
    """Put a fault into a copy; returns the file's content before.

    Raises:
        SystemExit: the text is not there exactly once.
    """
    path = folder / "nc" / mutation.file
    before = path.read_text(encoding="utf-8")
    found = before.count(mutation.text)
    if found != 1:
        sys.exit(
            f"{mutation.name}: nc/{mutation.file} has {mutation.text!r} {found} times, not once. Bring "
            "test/mutations.py up to date."
        )
    path.write_text(before.replace(mutation.text, mutation.fault), encoding="utf-8")
    return before


#: What ended instead of a test that failed: a fault in C code can end the process.
CRASH = "a crash of"


def files_of(name: str) -> list[Path]:
    """Return the test files of a name, wherever they are below the folder of tests."""
    return sorted((ROOT / "test").rglob(f"test_{name}.py"))


def failure(folder: Path, files: list[str], jobs: int, variables: Mapping[str, str]) -> str:
    """The first test that fails in a copy with some variables, or a crash; "" when all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-m",
        "not exhaustive",
    ]
    command += ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    environment = {**os.environ, **variables, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *files], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"{CRASH} {' '.join(files) or 'the suite'} (signal {-done.returncode})"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if (
        done.returncode not in (1, 2) or failed is None
    ):  # with several processes, -x ends as an interruption does
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed.group(1)


def main() -> None:
    """Run the mutations that this environment can notice, and print one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument(
        "--targeted", action="store_true", help="run only the test files that should notice a mutation"
    )
    parser.add_argument("--list", action="store_true", help="print the list and check its texts, run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--share", type=int, default=1, metavar="N", help="run every Nth mutation")
    parser.add_argument("--turn", type=int, default=0, metavar="K", help="which of the N shares")
    options = parser.parse_args()
    here = "emulated" if isas.SIMDE.exists() else "ipex" if not available_backends()["ipex"] else "native"
    chosen = [
        m
        for m in MUTATIONS
        if m.name in options.names or (not options.names and (options.list or m.environment == here))
    ]
    chosen = chosen[options.turn % options.share :: options.share]
    unknown = set(options.names) - {m.name for m in MUTATIONS}
    if unknown:
        sys.exit(f"There is no mutation {', '.join(sorted(unknown))}.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(ROOT, Path(temporary) / "copy", ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for mutation in chosen:  # before any of the long runs
            before = mutate(folder, mutation)
            (folder / "nc" / mutation.file).write_text(before, encoding="utf-8")
            if options.list:
                print(f"{mutation.name:24} nc/{mutation.file}: {mutation.guarantee}")
        if options.list:
            return
        lost = [m for m in chosen if not _try(folder, m, options.jobs, options.targeted)]
    lacking = [name for name, needed in ISAS.items() if not cpu.flags().issuperset(needed)]
    print(f"{len(chosen) - len(lost)} of {len(chosen)} mutations caught")
    sys.exit(verdict(lost, lacking))


def verdict(lost: list[Mutation], lacking: list[str]) -> int:
    """Print which mutations no test noticed, and return the exit code.

    Args:
        lost: they.
        lacking: instruction sets that this CPU has not.
    """
    open_ = [m.name for m in lost if lacking and m.file.startswith(_BY_ISA)]
    survivors = [m.name for m in lost if m.name not in open_]
    if survivors:
        print(f"not caught: {', '.join(survivors)}")
    if open_:
        print(f"not decided, this CPU lacks {', '.join(lacking)}: {', '.join(open_)}")
    return 1 if survivors else UNDECIDED if open_ else 0


def _try(folder: Path, mutation: Mutation, jobs: int, targeted: bool) -> bool:
    """Whether a test notices a mutation, and passes without it."""
    start = time.monotonic()
    variables = isas.emulation(mutation.emulated) if mutation.emulated else {}
    before = mutate(folder, mutation)
    files = [str(found.relative_to(ROOT)) for name in mutation.tests for found in files_of(name)]
    caught = failure(folder, files, jobs if len(files) > 1 else 1, variables)
    where = "" if caught else " (not in the files that should)"
    caught = caught or ("" if targeted else failure(folder, [], jobs, variables))
    (folder / "nc" / mutation.file).write_text(before, encoding="utf-8")
    if caught and failure(folder, files if caught.startswith(CRASH) else [caught], 1, variables):
        sys.exit(f"{caught} fails without the mutation {mutation.name} too; make the suite pass first.")
    seconds = time.monotonic() - start
    print(
        f"{mutation.name:24} {'caught by ' + caught + where if caught else 'NOT CAUGHT':90} {seconds:4.0f} s",
        flush=True,
    )
    return bool(caught)


if __name__ == "__main__":
    main()
