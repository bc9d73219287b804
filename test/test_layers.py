"""Imports go strictly downward: the abstract syntax tree of every module against the levels below."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: From the bottom; a module imports from levels below its own, and inside its own only where a package is named there
#: (`nc.observers`: its modules know their base). Entries are modules or whole packages.
LEVELS = (
    ("nc._version", "nc.errors", "nc.process.error_texts", "nc.process.lock", "nc.graph"),
    ("nc.process.warn",),
    ("nc.process.modes", "nc.process.torch_settings", "nc.formats", "nc.graph.fixed_module"),
    ("nc.formats.checks", "nc.numerics", "nc.graph.shares", "nc.text.table", "nc.process.installation", "nc.kernels.c_code"),
    ("nc.graph.plan",),
    ("nc.kernels.onednn",),
    ("nc.ops",),
    (
        "nc.weights",
        "nc.algorithms.inputs.activations",
        "nc.algorithms.inputs.computed",
        "nc.algorithms.inputs.copies",
        "nc.weights.heap",
        "nc.nn.tensor",
        "nc.algorithms.inputs.block_calls",
        "nc.nn.result",
        "nc.algorithms.inputs.statistics",
    ),
    ("nc.nn.calls",),
    ("nc.nn",),
    (
        "nc.graph.effects",
        "nc.graph.signature",
        "nc.graph.size_conditions",
        "nc.graph.caches",
        "nc.graph.schemas",
        "nc.graph.tensor_meta",
        "nc.graph.catalogue",
        "nc.graph.dataflow",
        "nc.graph.fx_utils",
        "nc.graph.recurrent",
        "nc.graph.views",
        "nc.graph.placement",
        "nc.graph.qdq",
        "nc.graph.fake_quant",
        "nc.graph.products",
        "nc.graph.saturation",
        "nc.graph.weight_reads",
        "nc.graph.multiply_adds",
    ),
    ("nc.observers", "nc.capture", "nc.proof"),
    ("nc.storage",),
    ("nc.calibration",),
    ("nc.algorithms",),
    (
        "nc.algorithms.inputs.layers",
        "nc.algorithms.inputs.collect",
        "nc.algorithms.solvers",
        "nc.weights.speed",
        "nc.algorithms.transforms",
    ),
    ("nc.config",),
    ("nc.planning.layer_plan",),
    ("nc.planning",),
    ("nc.backends",),
    ("nc.observed.prepared", "nc.api.report", "nc.backends.onnx", "nc.api.generation"),
    (
        "nc.weights.accuracy",
        "nc.weights.files.artefact",
        "nc.weights.driver",
        "nc.weights.encoders",
        "nc.weights.experts",
        "nc.api.mixed",
        "nc.weights.swap",
        "nc.weights.prepared",
        "nc.api.pretrained",
        "nc.weights.saved_calls",
        "nc.api.weight_report",
        "nc.weights.shared_work",
        "nc.weights.speed",
        "nc.weights.files.sources",
        "nc.weights.files.streamed",
        "nc.api.weight_verdict",
    ),
    ("nc.api.quantized", "nc.export"),
    ("nc.api.workflow", "nc.api.artefact", "nc.parity", "nc.interchange"),
    ("nc.torchao",),
    ("nc",),
    ("nc.cli",),
    ("nc.__main__",),
)
#: Packages whose own modules have an order among themselves.
INSIDE = {
    "nc.kernels.c_code": (
        ("nc.process.cache", "nc.kernels.c_code.failures", "nc.kernels.c_code.flags", "nc.kernels.c_code.isas", "nc.kernels.c_code.openmp"),
        ("nc.kernels.c_code.build",),
        ("nc.kernels.c_code",),
    ),
    "nc.api.generation": (
        ("nc.api.generation.names",),
        ("nc.api.generation.memory", "nc.api.generation.snapshot", "nc.api.generation.step"),
        ("nc.api.generation.decoder",),
        ("nc.api.generation",),
    ),
    "nc.kernels.onednn": (
        ("nc.kernels.onednn.api", "nc.kernels.onednn.descriptions", "nc.kernels.onednn.elf"),
        ("nc.kernels.onednn.primitives",),
        ("nc.kernels.onednn.execute",),
        ("nc.kernels.onednn.runner", "nc.kernels.onednn.self_test", "nc.kernels.onednn.trials"),
        ("nc.kernels.onednn.providers",),
        ("nc.kernels.onednn",),
    ),
    "nc.formats": (
        ("nc.formats.dtypes", "nc.formats.granularities", "nc.formats.reasons"),
        ("nc.formats.fake_spec", "nc.formats.weight_format"),
        ("nc.formats.specs",),
        ("nc.formats",),
    ),
    "nc.graph": (
        ("nc.graph.caches", "nc.graph.schemas", "nc.graph.size_conditions", "nc.graph.tensor_meta"),
        ("nc.graph.effects",),
        ("nc.graph.signature",),
        ("nc.graph.catalogue",),
        ("nc.graph.views", "nc.graph.weight_reads"),
        ("nc.graph.dataflow", "nc.graph.fx_utils", "nc.graph.multiply_adds", "nc.graph.recurrent"),
        ("nc.graph.placement",),
        ("nc.graph.qdq", "nc.graph.fake_quant"),
        ("nc.graph.products", "nc.graph.saturation"),
    ),
    "nc.capture": (
        (
            "nc.capture.decompose",
            "nc.capture.examples",
            "nc.capture.flatten",
            "nc.capture.naming",
            "nc.capture.recurrent",
            "nc.capture.same_outputs",
            "nc.capture.state",
            "nc.capture.precautions",
        ),
        ("nc.capture.export_guards", "nc.capture.rewrites", "nc.capture.size_paths"),
        ("nc.capture.calls", "nc.capture.value_reads"),
        ("nc.capture.capture",),
        ("nc.capture",),
    ),
    "nc.calibration": (
        ("nc.calibration.ranks", "nc.calibration.tensor_file"),
        ("nc.calibration.costly", "nc.calibration.observe", "nc.calibration.statistics"),
        (
            "nc.calibration.distributed",
            "nc.calibration.qparams",
            "nc.calibration.diagnostics",
            "nc.calibration.fake_ranges",
            "nc.calibration.local_error",
        ),
        ("nc.calibration",),
    ),
    "nc.storage": (
        (
            "nc.storage.atomic",
            "nc.storage.mapped",
            "nc.storage.json_values",
            "nc.storage.json_file",
            "nc.storage.allowlist",
            "nc.storage.arguments",
            "nc.storage.tensor_file",
        ),
        ("nc.storage.folder",),
        ("nc.storage.pytree_json",),
        ("nc.storage.graph_json",),
        ("nc.storage.store",),
        ("nc.storage",),
    ),
    "nc.interchange": (
        ("nc.interchange.layer", "nc.interchange.folder", "nc.interchange.gguf"),
        ("nc.interchange.awq", "nc.interchange.gptq", "nc.interchange.compressed_tensors"),
        ("nc.interchange.quark", "nc.interchange.gguf_writer", "nc.interchange.model"),
        ("nc.interchange",),
    ),
    "nc.planning": (
        ("nc.planning.dynamic_cost", "nc.planning.fake_rules", "nc.planning.matching"),
        ("nc.planning.nothing", "nc.planning.rules"),
        ("nc.planning",),
    ),
    "nc.backends.onnx": (
        ("nc.backends.onnx.integers", "nc.backends.onnx.program", "nc.backends.onnx.runtime", "nc.backends.onnx.sums"),
        ("nc.backends.onnx.convert", "nc.backends.onnx.report"),
        ("nc.backends.onnx.write",),
        ("nc.backends.onnx",),
    ),
    "nc.proof": (
        ("nc.proof.intermediates", "nc.proof.rounding_bounds"),
        ("nc.proof.teacher_forcing",),
        ("nc.proof.kernels",),
        ("nc.proof",),
    ),
    "nc.parity": (
        ("nc.parity.graph_diff", "nc.parity.engine_values"),
        ("nc.parity.compare",),
        ("nc.parity",),
    ),
    "nc.torchao": (("nc.torchao.primitives", "nc.torchao.quantize"), ("nc.torchao",)),
    "nc.cli": (("nc.cli.doctor", "nc.cli.inputs", "nc.cli.inspect"), ("nc.cli.pretrained",), ("nc.cli.main",), ("nc.cli",)),
    "nc.algorithms": (
        ("nc.algorithms.base",),
        ("nc.algorithms.replay", "nc.algorithms.side_by_side"),
        ("nc.algorithms.pipeline", "nc.algorithms.bias_correction", "nc.algorithms.equalization", "nc.algorithms.range_search"),
        ("nc.algorithms.bias_absorption", "nc.algorithms.dead_channels", "nc.algorithms.smooth_search"),
        ("nc.algorithms.smooth_quant",),
        ("nc.algorithms.smoothing",),
        ("nc.algorithms",),
    ),
    "nc.config": (
        ("nc.formats.rule_key",),
        ("nc.config.document", "nc.config.fields"),
        ("nc.config.base",),
        ("nc.config.strategies", "nc.config.fake_quant"),
        ("nc.config.neural_compressor",),
        ("nc.config",),
    ),
    "nc.numerics": (
        (
            "nc.numerics.affine",
            "nc.numerics.bits",
            "nc.numerics.histogram",
            "nc.numerics.int16_pairs",
            "nc.numerics.mean_error",
            "nc.numerics.metrics",
            "nc.numerics.mx",
        ),
        ("nc.numerics.dynamic",),
        ("nc.numerics.recurrent",),
        ("nc.numerics.formats", "nc.numerics.weight_mse", "nc.numerics.smoothing"),
        ("nc.numerics.groups", "nc.numerics.weights"),
        ("nc.numerics.error_feedback", "nc.numerics.packed_weight", "nc.numerics.stored_scales"),
        ("nc.numerics.fake_quant", "nc.numerics.least_squares", "nc.numerics.low_bit"),
        ("nc.numerics.group_ranges",),
        ("nc.numerics.clipping",),
        ("nc.numerics",),
    ),
    "nc.weights": (
        ("nc.algorithms.inputs.layers", "nc.algorithms.solvers.base", "nc.weights.speed", "nc.algorithms.transforms.wide"),
        (
            "nc.algorithms.inputs.collect",
            "nc.algorithms.solvers.autoround",
            "nc.algorithms.solvers.hqq",
            "nc.algorithms.solvers.rtn",
            "nc.algorithms.transforms.base",
        ),
        ("nc.algorithms.solvers.best", "nc.algorithms.solvers.gptq", "nc.algorithms.transforms.structure"),
        ("nc.algorithms.solvers", "nc.algorithms.transforms.folding"),
        ("nc.algorithms.transforms.rotation", "nc.algorithms.transforms.sets"),
        ("nc.algorithms.transforms.clip",),
        ("nc.algorithms.transforms.awq", "nc.algorithms.transforms.smooth", "nc.algorithms.transforms.teq"),
        ("nc.algorithms.transforms",),
        (
            "nc.weights.accuracy",
            "nc.weights.encoders",
            "nc.weights.swap",
            "nc.weights.saved_calls",
            "nc.weights.shared_work",
            "nc.api.weight_verdict",
        ),
        ("nc.api.weight_report",),
        ("nc.weights.experts",),
        ("nc.weights.driver",),
        ("nc.weights.files.artefact", "nc.weights.prepared"),
        ("nc.api.mixed", "nc.weights.files.sources", "nc.weights.files.streamed"),
        ("nc.api.pretrained",),
    ),
    "nc.observers": (
        ("nc.observers.base",),
        ("nc.observers.histogram", "nc.observers.channels"),
        ("nc.observers.minmax", "nc.observers.moving_average", "nc.observers.percentile", "nc.observers.mse", "nc.observers.kl"),
        ("nc.observers.auto",),
        ("nc.observers",),
    ),
    "nc.backends": (
        (
            "nc.backends.auto_order",
            "nc.backends.cpu",
            "nc.backends.dynamic",
            "nc.backends.passes",
            "nc.backends.program",
            "nc.backends.spawn",
            "nc.backends.verify",
            "nc.backends.profiling.onednn_verbose",
            "nc.backends.profiling.bandwidth",
            "nc.backends.profiling.load",
            "nc.backends.profiling.own_model",
        ),
        ("nc.backends.profiling.latency",),
        ("nc.backends.low_bit.kernel", "nc.backends.low_bit.large_pages"),
        (
            "nc.backends.low_bit",
            "nc.backends.low_bit.aten",
            "nc.backends.low_bit.bag",
            "nc.backends.low_bit.blocks",
            "nc.backends.low_bit.compiled",
        ),
        ("nc.backends.low_bit.compiled_blocks",),
        ("nc.backends.low_bit.choose",),
        ("nc.backends.profiling.profile", "nc.backends.profiling"),
        ("nc.backends.base",),
        ("nc.backends.profiling.process", "nc.backends.table", "nc.backends.torchscript"),
        ("nc.backends.profiling.nodes",),
        ("nc.backends.reference", "nc.backends.profiling.verdict"),
        ("nc.backends",),
        ("nc.backends.low_bit.engine",),
        ("nc.backends.low_bit.graph",),
        ("nc.backends.native.attention", "nc.backends.native.bf16", "nc.backends.native.qdq_rewrites", "nc.backends.native.operators"),
        ("nc.backends.native.regions",),
        ("nc.backends.native.grouped",),
        ("nc.backends.native.fuse", "nc.backends.native.judge"),
        ("nc.backends.native.plans", "nc.backends.native.plans.checks", "nc.backends.native.plans.entries"),
        ("nc.backends.native.plans.arena", "nc.backends.native.plans.context", "nc.backends.native.plans.values"),
        ("nc.backends.native.plans.recorder",),
        ("nc.backends.native.plans.elementwise", "nc.backends.native.plans.functions"),
        ("nc.backends.native.plans.avx2", "nc.backends.native.plans.int8_attention", "nc.backends.native.plans.rotary"),
        ("nc.backends.native.plans.masks", "nc.backends.native.plans.steps"),
        ("nc.backends.native.plans.products",),
        ("nc.backends.native.plans.others",),
        ("nc.backends.native.plans.attention",),
        ("nc.backends.native.plans.low_bit",),
        ("nc.backends.native.plans.model", "nc.backends.native.tried"),
        ("nc.backends.native.packing",),
        (
            "nc.backends.native.compiled",
            "nc.backends.native.execute",
            "nc.backends.native.factors",
            "nc.backends.native.matmul",
            "nc.backends.native.merge",
            "nc.backends.native.norms",
            "nc.backends.native.recurrent",
        ),
        ("nc.backends.native.rotary", "nc.backends.native.transposed"),
        ("nc.backends.native.inductor_names",),
        ("nc.backends.native.passes",),
        ("nc.backends.native.decode", "nc.backends.native.lower"),
        ("nc.backends.native.package",),
        ("nc.backends.native",),
        ("nc.backends.openvino.extremes", "nc.backends.openvino.low_bit", "nc.backends.openvino.runtime"),
        ("nc.backends.openvino.program",),
        ("nc.backends.openvino.convert", "nc.backends.openvino.layers"),
        ("nc.backends.openvino.lower",),
        ("nc.backends.openvino.write",),
        ("nc.backends.openvino",),
        (
            "nc.backends.ipex.capture_passes",
            "nc.backends.ipex.compile_gate",
            "nc.backends.ipex.layout",
            "nc.backends.ipex.quiet",
            "nc.backends.ipex.patterns",
            "nc.backends.ipex.workarounds",
            "nc.backends.ipex.executed_graph",
            "nc.backends.ipex.tested_patterns",
        ),
        ("nc.backends.ipex.child", "nc.backends.ipex.passes", "nc.backends.ipex.timing"),
        ("nc.backends.ipex.isolate",),
        ("nc.backends.ipex.lower",),
        ("nc.backends.ipex",),
    ),
}
#: Modules that may import inside functions, and what, with the reason.
DEFERRED = {
    "nc.backends": ("nc.backends.ipex", "nc.backends.native", "nc.backends.openvino"),  # an engine is loaded when somebody asks for it
    "nc.backends.profiling.verdict": ("nc.backends.native.attention",),  # `load` measures nothing and needs no engine but its own
    # names and versions are known without loading the engine
    "nc.backends.ipex": ("nc.backends.ipex.lower", "nc.backends.ipex.quiet"),
    "nc.api.generation.decoder": ("nc.backends.native.decode",),  # likewise
    "nc.__main__": ("nc.cli.main",),  # after it is known that the package is ours
    "nc.cli.main": ("nc",),  # `--help` must not wait for torch
}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted((ROOT / "nc").rglob("*.py"))}


def level(module, table):
    """Index of the most specific entry that covers a module; None when there is none ("nc" and "nc.graph" stand for themselves)."""
    for name in _parents(module):
        for i, entries in enumerate(table):
            if name in entries and (name == module or name not in ("nc", "nc.graph")):
                return i
    return None


def _parents(module):
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


@functools.cache
def imports(module):
    """[(imported module, whether inside a function)]; `from package import module` counts as the module."""
    found = []

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module}: relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    found.append((full if full in FILES else child.module, inside))
            elif isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(FILES[module].read_text(encoding="utf-8")), False)
    return tuple(found)


def own(module):
    return [(name, inside) for name, inside in imports(module) if name.split(".")[0] == "nc"]


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module):
    here = level(module, LEVELS)
    assert here is not None, f"enter {module} into LEVELS"
    for name, inside in own(module):
        if inside:
            continue  # see the next test
        there = level(name, LEVELS)
        if there == here:
            package = next((p for p in INSIDE if module.startswith(p) and name.startswith(p)), None)
            assert package, f"{module} imports {name}, of its own level"
            a, b = level(module, INSIDE[package]), level(name, INSIDE[package])
            assert a is not None, f"enter {module} into INSIDE[{package!r}]"
            assert b is not None, f"enter {name} into INSIDE[{package!r}]"
            assert b < a, f"{module} imports {name}, which is not below it"
        else:
            assert there < here, f"{module} imports {name}, which is above it"


@pytest.mark.parametrize("module", FILES)
def test_imports_inside_functions_are_the_listed_ones(module):
    allowed = DEFERRED.get(module, ())
    for name, inside in own(module):
        assert not inside or any(name == a or name.startswith(f"{a}.") for a in allowed), f"{module} defers {name}"


def test_every_entry_of_the_tables_exists():
    entries = [e for table in (LEVELS, *INSIDE.values()) for entries in table for e in entries]
    assert not [e for e in [*entries, *INSIDE, *DEFERRED] if e not in FILES]


def test_algorithms_and_backends_do_not_know_each_other():
    for module in FILES:
        for a, b in (("nc.algorithms", "nc.backends"), ("nc.backends", "nc.algorithms")):
            if module.startswith(a):
                assert not [name for name, _ in own(module) if name.startswith(b)]


def test_ipex_is_imported_in_one_place_and_only_when_used():
    engine = "intel_extension_for_pytorch"
    users = {module: inside for module in FILES for name, inside in imports(module) if name.split(".")[0] == engine}
    assert users == {"nc.backends.ipex.quiet": True}


def test_nothing_above_the_graph_reads_a_configuration():
    """Backends and algorithms see the QDQ graph and the plan only."""
    for module in FILES:
        if module.startswith(("nc.graph", "nc.algorithms", "nc.backends.ipex", "nc.observers", "nc.numerics")):
            assert not [name for name, _ in own(module) if name.split(".")[:2] == ["nc", "config"]], module


def test_only_capture_and_load_decide_the_kind_of_an_operator():
    """All else reads it, so an operator has one kind everywhere."""
    users = {module for module, path in FILES.items() if "decide_kinds" in names_in(path)}
    assert users == {"nc.graph.catalogue", "nc.capture.naming", "nc.storage.graph_json"}


def test_arguments_are_read_by_their_names():
    """`Linear.of(node).weight`, not `node.args[1]`: a position says nothing, and a graph may give an argument by name."""
    readers = {"nc.graph.catalogue"}  # where names are looked up
    assert {module for module, path in FILES.items() if "args" in subscripted_in(path)} == readers


def subscripted_in(path):
    """Names of the attributes of which a file reads a part: `args` for `node.args[1]` and `node.args[:2]`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value.attr for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute)}


def names_in(path):
    """Every name, attribute and function in a file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {getattr(node, field) for node in nodes for field in ("id", "attr", "name") if isinstance(getattr(node, field, None), str)}


def test_the_table_catches_an_import_upward(monkeypatch):
    fake = {"nc.formats.dtypes": (("nc.planning.rules", False),), "nc.observers.base": (("nc.observers.minmax", False),)}
    monkeypatch.setattr(f"{__name__}.imports", lambda module: fake.get(module, ()))
    for module in fake:
        with pytest.raises(AssertionError, match=f"{module} imports"):
            test_imports_go_down(module)


#: What torch makes of floats is of the user's default dtype, unless it is named.
_OF_FLOATS = {"as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}


def test_new_tensors_name_their_dtype():
    found = []
    for path in sorted((ROOT / "nc").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_FLOATS:
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                if of_torch and "dtype" not in {keyword.arg for keyword in node.keywords}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
