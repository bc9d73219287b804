"""Write docs/reference/ from the code: `python docs/make_reference.py`.

A test compares the files with what this makes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click

import nc
import nc.hf
from nc import errors
from nc.algorithms import POST, PRE
from nc.algorithms.solvers import SOLVERS
from nc.algorithms.transforms import TRANSFORMS
from nc.api.quantized import QuantizedModel
from nc.backends import get_backend
from nc.backends.native.low_bit_rows import LEAST_ROWS
from nc.backends.table import support_table
from nc.backends.verdict import Verdict
from nc.calibration.statistics import Statistics
from nc.cli.check import PATHS
from nc.cli.main import main as command_line
from nc.config.base import QuantConfig, strategies
from nc.config.document import Document
from nc.config.fields import one_of
from nc.formats import DTYPES, DoubleQuant, FakeTensorSpec
from nc.formats.reasons import Cause
from nc.graph.plan import Plan
from nc.interchange import FORMATS
from nc.kernels import cpu
from nc.kernels.low_bit.kernel import ANY_ROWS, LowBitKernel
from nc.observers import ALGORITHMS
from nc.process import env
from nc.profiling import scaling
from nc.reports.op_report import OpReport
from nc.reports.report import Report
from nc.storage import layout

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- made by docs/make_reference.py: change the code, not this page -->"
#: Features of a CPU on which every engine can what it can anywhere.
BEST_CPU = ("avx2", "avx512f", "avx512_vnni")
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "Examples")


# ---- docstrings ----


@dataclasses.dataclass(frozen=True, slots=True)
class Doc:
    """A docstring in Google's style, taken apart.

    Attributes:
        body: paragraphs before the sections.
        items: section → (names, text) of each entry.
        tail: paragraphs after the sections.
    """

    body: tuple[str, ...]
    items: dict[str, list[tuple[str, str]]]
    tail: tuple[str, ...]


def parsed(thing: object) -> Doc:
    """Return the docstring of an object, taken apart."""
    body: list[str] = []
    tail: list[str] = []
    items: dict[str, list[tuple[str, str]]] = {}
    section = ""
    for block in re.split(r"\n\s*\n", inspect.getdoc(thing) or ""):
        lines = block.splitlines()
        heading = lines[0].removesuffix(":")
        if heading in _SECTIONS and lines[0].endswith(":"):
            section, lines = heading, lines[1:]
        elif section and not lines[0].startswith(" "):
            section = ""
            tail.append(_flowing(lines))
            continue
        elif not section:
            body.append(_flowing(lines))
            continue
        for line in lines:
            named = re.match(r"    (\*{0,2}[A-Za-z_][\w, .]*): (.*)", line)
            if named:
                items.setdefault(section, []).append((named[1], named[2].strip()))
            elif items.get(section):
                name, text = items[section][-1]
                items[section][-1] = (name, f"{text} {line.strip()}")
            else:
                items.setdefault(section, []).append(("", line.strip()))
    return Doc(tuple(body), items, tuple(tail))


def _flowing(lines: Sequence[str]) -> str:
    """One paragraph in one line; a list keeps its lines."""
    text = ""
    for line in lines:
        text += ("\n" if line.startswith("* ") else " ") + line.strip()
    return text.strip()


def meanings(thing: object, section: str) -> dict[str, str]:
    """Return what a section says of each name."""
    return {
        name.strip(): text
        for names, text in parsed(thing).items.get(section, [])
        for name in names.split(",")
    }


# ---- Markdown ----


def text(value: str) -> str:
    """Return a text of a docstring as Markdown: paths of documents become links."""
    parts = re.split(r"(`[^`]*`)", value)
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return re.sub(
        r"docs/([\w/-]+?)([\w-]+)\.md",
        lambda m: f"[{m[2].replace('-', ' ')}](../{m[1]}{m[2]}.md)",
        "".join(parts),
    )


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [heading, ["---"] * len(heading), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(value: object) -> str:
    """Return a value as code, or nothing for None that says nothing."""
    return f"`{value!r}`"


def page(title: str, *parts: str) -> str:
    """Return a page."""
    return "\n\n".join([f"# {title}", NOTE, *filter(None, parts)]) + "\n"


def fields_table(cls: type) -> str:
    """Return the options of a dataclass."""
    says = meanings(cls, "Attributes")
    rows = [(f"`{f.name}`", code(f.default), text(says.get(f.name, ""))) for f in dataclasses.fields(cls)]
    return table(("option", "default", "meaning"), rows) if rows else "It has no options."


# ---- pages ----


def configurations() -> str:
    """Every strategy with its fields, and the values that they contain."""
    parts = [
        "A field that is not given has its default; in a local configuration it has the value of the "
        "[next rule that matches](../how-to/keep-layers-float.md#fields-that-a-rule-does-not-give). "
        "*Whole model* marks fields that local configurations cannot have. Every configuration also takes "
        "`white_list`.",
    ]
    static = meanings(nc.StaticQuantConfig, "Args")
    every_dtype = one_of(*DTYPES).values
    for cls in sorted(strategies().values(), key=lambda cls: cls.family == "fake_quant"):
        says = {**static, **meanings(cls, "Args")}
        rows = [
            (
                f"`{name}`" + (" *whole model*" if field.outer else ""),
                code(field.default),
                field.check.values.replace(every_dtype, "a [number format](number-formats.md)"),
                text(static[name] if says[name].startswith("as for static") else says[name]),
            )
            for name, field in cls.FIELDS.items()
        ]
        parts += [f"## {cls.__name__}", text(parsed(cls).body[0]), *map(text, parsed(cls).body[1:2])]
        parts += [table(("field", "default", "values", "meaning"), rows)]
    says = meanings(FakeTensorSpec, "Attributes")
    rows = [(f"`{f.name}`", text(says[f.name])) for f in dataclasses.fields(FakeTensorSpec)]
    parts += ["## FakeTensorSpec", text(parsed(FakeTensorSpec).body[0]), table(("field", "meaning"), rows)]
    parts += ["## DoubleQuant", text(parsed(DoubleQuant).body[0]), fields_table(DoubleQuant)]
    parts += [
        "## Methods of all configurations",
        methods(QuantConfig, "set_local", "exclude", "__add__", "to_dict", "from_dict"),
    ]
    parts += [methods(Document, "to_json_file", "from_json_file", "to_json", "from_json")]
    return page("Configurations", *parts)


def methods(cls: type, *names: str) -> str:
    """Return a list of methods and properties with what they do."""
    lines = []
    for name in names:
        member = inspect.getattr_static(cls, name)
        shown = (
            name
            if isinstance(member, property)
            else f"{name}{parameters(getattr(cls, name))}".replace("(self, ", "(").replace("(self)", "()")
        )
        lines.append(
            f"* `{shown}`: "
            f"{text(parsed(member.__func__ if isinstance(member, classmethod) else member).body[0])}"
        )
    return "\n".join(lines)


def algorithms() -> str:
    """Return what `act_algo`, `pre`, `post`, `solver` and `transforms` take."""
    ranges = [(f'`"{a.name}"`', text(_first(a.name))) for a in ALGORITHMS.values()]
    parts = ["## Range algorithms (`act_algo`)", table(("name", "the range"), ranges)]
    for title, known in (
        ("Algorithms for the fp32 model (`pre`)", PRE),
        ("Algorithms for the quantized model (`post`)", POST),
        ("Solvers (`solver` of `WeightOnlyConfig`)", SOLVERS),
        ("Transforms (`transforms` of `WeightOnlyConfig`)", TRANSFORMS),
    ):
        parts.append(f"## {title}")
        for cls in known.values():
            parts += [f"### {cls.__name__}", text(parsed(cls).body[0]), fields_table(cls)]
    return page("Algorithms", *parts)


def _first(algorithm: str) -> str:
    """Return the first paragraph of a range algorithm's module, without the name before it."""
    paragraph = (sys.modules[f"nc.observers.{algorithm}"].__doc__ or "").split("\n\n")[0]
    return re.sub(r"^[\w-]+: ", "", " ".join(paragraph.split()))


def number_formats() -> str:
    """Return every dtype."""
    rows = []
    for dtype in DTYPES.values():
        finite = sorted(value for value in dtype.values if abs(value) < float("inf"))
        span = f"{finite[0]:g} to {finite[-1]:g}" if finite else f"{dtype.quant_min} to {dtype.quant_max}"
        rows.append((f"`{dtype.name}`", str(dtype.bits), dtype.kind, span))
    return page("Number formats", table(("dtype", "bits", "kind", "values without a scale"), rows))


def operators() -> str:
    """Operators by engine, and the kernels for low-bit weights."""
    with mock.patch.object(cpu, "machine_features", return_value=BEST_CPU):
        support = support_table([get_backend(name) for name in ("ipex", "native", "openvino", "reference")])
    kernels = [_kernel(kernel) for kernel in get_backend("native").low_bit_kernels() if not kernel.refused]
    heading = ("kernel", "activations", "weights", "rows M", "needs", "computes")
    return page(
        "Operators and engines",
        "What each engine computes in integers, on the CPUs that can most. Everything else is fp32, and the "
        "plan gives the reason.",
        support,
        "Weights are symmetric, per output channel or per tensor.",
        "## Kernels for low-bit weights",
        "The first kernel of `native` that takes the layer and the number of rows M (tokens) of a call "
        "computes it.",
        'In plans the product of dynamic ones, `c:row_product`, computes those with `act_dtype="int8"` and '
        "a symmetric weight of 5 to 8 bits with one scale per output, where the example has "
        f"{LEAST_ROWS} rows or more: it takes no longer there, shares rounded rows, and has the "
        "activation and the sum that follow in it. Calls with fewer rows keep it, so that a weight is held "
        "once. It would hold 4 bits as 8 and gain no time; modules outside plans would hold two layouts.",
        table(heading, kernels),
    )


def _kernel(kernel: LowBitKernel) -> tuple[str, ...]:
    bits = (
        f"integers of {kernel.bits[0]} to {kernel.bits[-1]} bits"
        if len(kernel.bits) > 1
        else f"integers of {kernel.bits[0]} bits"
    )
    floats = "every format" if kernel.floats is None else ", ".join(kernel.floats)
    groups = f"; groups of {', '.join(map(str, kernel.groups))}" if kernel.groups else ""
    groups += f"; groups in multiples of {kernel.group_step}" if kernel.group_step > 1 else ""
    limits = "; one scale per row" * kernel.whole_row + "; symmetric" * (not kernel.zero_points)
    limits += f"; N a multiple of {kernel.outputs}" * (
        kernel.outputs > 1
    ) + f"; K a multiple of {kernel.inputs}" * (kernel.inputs > 1)
    rows = "any" if kernel.max_rows == ANY_ROWS else f"up to {kernel.max_rows}"
    weights = f"{bits}{f'; {floats}' if floats else ''}{groups}{limits}"
    return (
        f"`{kernel.name}`",
        ", ".join(kernel.activations),
        weights,
        rows,
        ", ".join(kernel.isa),
        text(kernel.what),
    )


def commands() -> str:
    """Return the command line."""
    parts = [
        "`python -m nc COMMAND`, also as `nc-quant COMMAND`. Results go to stdout; progress, warnings and "
        "errors go to stderr. Exit code 2 means that the command failed, and one line says why. Exit code 1 "
        "means that `doctor` found a problem, or that an artefact misses a limit of `check`; 70 means a "
        "defect of nc, and 130 Ctrl-C.",
        'Names complete in a shell after `eval "$(_NC_QUANT_COMPLETE=bash_source nc-quant)"`; `zsh_source` '
        "and `fish_source` are for the others.",
    ]
    assert isinstance(command_line, click.Group)
    for name, command in command_line.commands.items():
        context = click.Context(
            command, info_name=f"python -m nc {name}", terminal_width=200, max_content_width=200
        )
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts += [f"## {name}", f"```\n{' '.join(usage.split())}\n```"]
        parts += [text(" ".join(paragraph.split())) for paragraph in (command.help or "").split("\n\n")]
        records = (p.get_help_record(context) for p in command.params if isinstance(p, click.Option))
        parts.append(
            table(
                ("option", "meaning"), [(f"`{record[0]}`", text(record[1])) for record in records if record]
            )
        )
        if name == "check":
            parts.append(
                table(("what happens", "exit code", "outcome"), [tuple(map(str, row)) for row in PATHS])
            )
    return page("Command line", *parts)


def environment() -> str:
    """Return the environment variables."""
    heading = ("variable", "values", "default", "meaning")

    def rows(variables: Iterable[env.Variable]) -> list[tuple[str, ...]]:
        return [(f"`{v.name}`", v.values, v.default, v.meaning) for v in variables]

    return page(
        "Environment variables",
        "A variable is read when its value is needed. These are all that nc reads:",
        table(heading, rows(env.VARIABLES)),
        "These change what libraries do that nc calls:",
        table(heading, rows(env.OTHERS)),
    )


def error_page() -> str:
    """Return the errors and warnings, with what to do."""
    found = [
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, (Exception, Warning))
    ]
    rows = []
    for cls in found:
        ours = [base for base in cls.__bases__ if base in found]
        builtin = [base for base in cls.__bases__ if base not in found]
        what, *do = re.split(r"(?<=\.) ", " ".join(parsed(cls).body), maxsplit=1)
        kind = ", ".join(f"`{base.__name__}`" for base in (*ours, *builtin))
        rows.append((f"`{cls.__name__}`", kind, text(what), text(" ".join(do))))
    return page(
        "Errors",
        "Every message says what was wrong, where, and what to do. All errors are `nc.NCError`.",
        table(("error", "is a", "when", "what to do"), rows),
    )


#: As it was printed for a BERT of two layers with random weights, on an Intel Xeon with AMX.
REPORT = """\
BertModel on native: 17 of 17 products run in int8
speed: int8 4.57 ms, fp32 17.91 ms (example inputs, 2 threads): 3.91 times as
    fast (3.82 to 4.00)
error: 40.8 dB (0.91 %) against fp32 on 4 batches of calibration data that was
    held out; 0.6% of the largest entries change
size: 7.0 MB, fp32 17.1 MB
judged by 8 rows held out; chosen: ranges per row, it is the fastest within 0.8
    dB of the least error
  tried                               error      time
  ranges per row, attention in float  39.4 dB    3.90 ms
  ranges per row                      39.5 dB    3.69 ms
  static                              36.4 dB    2.93 ms
  bf16                                near fp32  4.55 ms
not int8, and why:
- 3 x a table look-up: no arithmetic to quantize: "embeddings.word_embeddings",
    "embeddings.token_type_embeddings", "embeddings.position_embeddings"
- … 5 more
most error: "pooler.dense" 81%, "encoder.layer.1.intermediate.dense" 8%,
    "encoder.layer.0.intermediate.dense" 4%
most time: "encoder.layer.1.attention.self.query" + 2 more 0.50 ms, fp32 1.67
    ms, "encoder.layer.0.attention.self.query" + 2 more 0.45 ms, fp32 1.68 ms,
    "encoder.layer.0.intermediate.dense" + 1 more 0.38 ms, fp32 2.40 ms
All operators, kernels and checks: report(details=True)
"""
#: Its lines → what they mean.
LINES = {
    "`… products run in int8`": "products are linears, convolutions, matmuls and recurrent layers, all that "
    "multiplies. Where none runs in int8, the line says why.",
    "`speed`": "medians of calls of your model and of the quantized one, in turns, on the example inputs. "
    "The range in brackets has the ratio in 95 of 100 such measurements. With `cannot tell` the machine was "
    "too busy, or had no time for enough calls.",
    "`error`": "signal to quantization noise of the outputs in dB, and the error as a share of the outputs: "
    "20 dB are 10 %, 40 dB are 1 %. `largest entries`: of outputs that look like scores. Below 20 dB the "
    "text begins with LOW or HOPELESS instead.",
    "`size`": "bytes of the constants.",
    "`chosen`": 'why "auto" took one of the rows below it; the times are of the example inputs.',
    "`not int8, and why`": "operators by reason, products first. Names can be copied into `config.exclude`.",
    "`most error`": "the operators that add most of the error, with their share of it; `dB alone`: the error "
    "of the operator's result alone, where shares were not measured.",
    "`most time`": "the operators that take most time, with what is fused into them, and the time of the "
    "same in fp32; with `profile_inputs` shares of a call.",
    "`what to do next`": "what is likely to help here.",
}
#: Lines of details, by their first words → what they mean.
DETAILS = {
    "`backend`": "the engine, and how many of the operators that were asked to run int8 do.",
    "`weights`, `multiply-adds`": "shares of the values and of the work by precision.",
    '`"auto" takes`': "why this engine was chosen.",
    "`… fused int8 groups`": "of engines that fuse groups: how many, and what is outside them.",
    "`constants`": "bytes of the engine's constants and of those of fp32.",
    "`on the example inputs`": "error of the quantized graph against fp32, and of the engine against the "
    "quantized graph. The second is the proof of the kernels.",
    "`quantized graph`": "its error on calibration data.",
    "`the integer ranges rely on`": "CPU features without which sums of products could saturate.",
    "`auto`": "all that was tried, and what was decided.",
    "`autoquant`, `guard`": "what a search chose, and what was left in float.",
    "`accuracy floor`": "why operators are in float although int8 is faster.",
    "`sensitivity`": "shares of the error by operator, their error alone and their times.",
    "`bias_correction`, `dead_channels`, …": "what each [algorithm](algorithms.md) did, or why it did "
    "nothing.",
    "`health`": "what calibration found, the worst of each kind.",
    "`rewritten`": "patterns that were rewritten because an engine computes them wrongly.",
    "`wrong sums, so not taken`": "kernels of oneDNN that gave wrong results on this CPU.",
    "`not planned`": "why a part runs without a plan.",
    "`OpenVINO`, `threads`, `all that is not int8`": "its version, threads, and the precision of the rest.",
    "`run by`": "why TorchScript runs the graph, and not a plan of nc.",
    "`kernels`": "which libraries compute.",
    "`kernels compared`": "the proof, kernel by kernel: tensors compared with the reference, the largest "
    "distance of codes from exact rounding in quanta, and the least SQNR of fp32 results. Results that no "
    "memory holds are judged with the next kernel.",
    "`sizes compared`": "the same for other batch sizes and lengths.",
    "`computed by torch`": "operators for which no kernel of nc is used, and why.",
    "`not in one call`": "operators that are not fused with their neighbours, and why.",
    "`between the kernels`": "what computes the rest.",
    "`padding`": "whether rows of padding are computed, and why.",
    "`kernel … is not used for`": "a faster kernel that does not compute some layers, and why.",
    "`profile`, `on … threads`": "times of a call and of its steps, and what more threads would give.",
    "`… failed`": 'what "auto" passed over, with its traceback.',
}


def reports() -> str:
    """Return the report: columns, fields, and the reasons for fp32."""
    columns = {"type": "kind", "why": "reason"}
    names = ("operator", "type", "asked", "ran", "share", "kernel", "why")
    says = meanings(OpReport, "Attributes")
    fields = [
        [(f"`{f.name}`", text(meanings(cls, "Attributes").get(f.name, ""))) for f in dataclasses.fields(cls)]
        for cls in (Report, OpReport)
    ]
    causes = [(f"`{cause.name}`", text(cause.value)) for cause in Cause if cause is not Cause.OTHER]
    return page(
        "Report",
        "[What to do about it](../how-to/accuracy-dropped.md) and [about "
        "speed](../how-to/speed-is-not-there.md) is explained elsewhere.",
        "## What `print(report)` shows",
        "At most 25 lines. For a BERT of two layers with random weights, on an Intel Xeon with AMX:",
        f"```text\n{REPORT}```",
        table(("line", "meaning"), LINES.items()),
        "## What `report(details=True)` adds",
        "Lines of engines and algorithms, then a table of all operators. Equal blocks are one row.",
        table(("line begins with", "meaning"), DETAILS.items()),
        "## Columns of the table",
        table(("column", "meaning"), [(name, text(says[columns.get(name, name)])) for name in names]),
        "`share` and `kernel` are there with `report(profile_inputs=…)`, `kernel` also where an engine knows "
        "its kernels.",
        "## Fields of `Report`",
        table(("field", "meaning"), fields[0]),
        "## Fields of `report.ops`",
        table(("field", "meaning"), fields[1]),
        "## Fields of `report.verdict`",
        table(
            ("field", "meaning"),
            [(f"`{name}`", text(says)) for name, says in meanings(Verdict, "Attributes").items()],
        ),
        "## More threads",
        f"A profile on `native` predicts a call on {', '.join(map(str, scaling.COUNTS[1:]))} threads. "
        "`print(report.profile.scaling())` shows the table. "
        + inspect.cleandoc(scaling.__doc__ or "").partition("\n\n")[2],
        f"A barrier calls all threads and waits for the last one. It is assumed to take "
        f"{1e3 * scaling.BARRIER_MS:g} µs and {1e3 * scaling.BARRIER_MS_PER_THREAD:g} µs for each thread. "
        f"Steps that one thread does alone for more than {100 * scaling.MOST_ALONE:g} % of a call on "
        f"{scaling.AT_THREADS} threads are named.",
        "## Reasons why an operator stays fp32",
        "Words in braces are filled in. What an engine adds is explained "
        "[here](../concepts/why-a-layer-stays-float.md).",
        table(("reason", "text"), causes),
    )


def artefacts() -> str:
    """Return the file layout of artefacts."""

    def rows(named: dict[str, str]) -> list[tuple[str, str]]:
        return [(f"`{name}`", text(meaning)) for name, meaning in named.items()]

    return page(
        "Files of an artefact",
        "[What saving and loading guarantee](../concepts/the-artefact.md) is explained elsewhere.",
        table(("file", "holds"), rows(layout.FILES)),
        "## A captured model: `format` is `nc-model`",
        table(("key of model.json", "holds"), rows(layout.GRAPH_KEYS)),
        table(("tensor", "holds"), rows(layout.GRAPH_TENSORS)),
        "## A model with low-bit weights: `format` is `nc-weights`",
        table(("key of model.json", "holds"), rows(layout.WEIGHT_KEYS)),
        "A low-bit weight has those of these tensors that its format needs, with the name of its layer in "
        "front:",
        table(("tensor", "holds"), rows(layout.WEIGHT_TENSORS)),
        "## What is replaced",
        "All that nc writes is written beside its target, flushed, and renamed. It replaces what an earlier "
        "call wrote, and nothing else: other files and folders, damaged ones, and those of a newer nc stay, "
        "with an `ArtefactError`. A full disk or a missing permission is an `ArtefactWriteError`. A symbolic "
        "link stays a link, and what it leads to is replaced by the same rule; one that leads nowhere is an "
        "error, as are pipes and devices.",
        table(("what", "is known by"), [(text(name), text(mark)) for name, mark in layout.KNOWN.items()]),
    )


def functions() -> str:
    """Return what users call, and what it gives them."""
    parts = []
    public = {
        name: value
        for name, value in ((name, getattr(nc, name)) for name in dir(nc))
        if isinstance(value, types.FunctionType)
    }
    ours = {name: value for name, value in public.items() if not value.__module__.startswith("nc.config")}
    for name, function in ours.items():
        parts += [f"## nc.{name}", *_function(name, function)]
    parts += [
        "## QuantizedModel",
        text(parsed(QuantizedModel).body[0]),
        methods(QuantizedModel, "report", "save", "reference"),
    ]
    parts += ["## statistics of a prepared model", methods(Statistics, "save", "load", "merge")]
    parts += ["## Plan, the result of `describe`", methods(Plan, "explain", "table", "to_dict", "quantized")]
    parts += ["## Formats of `export_weights`", ", ".join(f"`{name}`" for name in FORMATS)]
    parts += [f"# nc.hf: {text(parsed(nc.hf).body[0])}", *map(text, parsed(nc.hf).body[1:])]
    for name, value in sorted(vars(nc.hf).items()):
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            parts += [f"## nc.hf.{name}", *_function(name, value)]
    parts += ["# Functions with names of Neural Compressor"]
    for name, function in public.items():
        if name not in ours and not name.startswith("get_"):
            parts += [f"## nc.{name}", *_function(name, function)]
    return page("Functions", *parts)


def _function(name: str, function: Callable[..., Any]) -> list[str]:
    found = parsed(function)
    parts = [f"```\n{_wrapped(f'{name}{parameters(function)}')}\n```", *map(text, found.body)]
    for section, heading in (("Args", "argument"), ("Attributes", "attribute"), ("Raises", "error")):
        if section in found.items:
            rows = [
                (", ".join(f"`{n.strip()}`" for n in names.split(",")), text(meaning))
                for names, meaning in found.items[section]
            ]
            parts.append(table((heading, "when" if section == "Raises" else "meaning"), rows))
    returned = " ".join(
        f"{names}: {meaning}" if names else meaning for names, meaning in found.items.get("Returns", [])
    )
    return [*parts, *([f"Returns: {text(returned)}"] if returned else []), *map(text, found.tail)]


def parameters(function: Callable[..., Any]) -> str:
    """Return the parameters without types."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _wrapped(line: str) -> str:
    """Break the call of a function so that it fits 100 columns."""
    lines, indent = [""], 4
    for word in line.split(" "):
        if len(lines[-1]) + len(word) > 100:
            lines.append(" " * indent)
        lines[-1] += word + " "
    return "\n".join(each.rstrip() for each in lines)


PAGES: dict[str, Callable[[], str]] = {
    "configurations.md": configurations,
    "algorithms.md": algorithms,
    "number-formats.md": number_formats,
    "operators.md": operators,
    "functions.md": functions,
    "command-line.md": commands,
    "environment.md": environment,
    "errors.md": error_page,
    "report.md": reports,
    "artefacts.md": artefacts,
}


def index() -> str:
    """Return the page that lists the others."""
    rows = []
    for name, make in PAGES.items():
        title = make().splitlines()[0].removeprefix("# ")
        rows.append(f"* [{title}]({name})")
    return page("Reference", "These pages are generated from the code.", "\n".join(rows))


def contents() -> dict[str, str]:
    """Return the text of every page by its file name."""
    return {"README.md": index(), **{name: make() for name, make in PAGES.items()}}


def write(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents().items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
