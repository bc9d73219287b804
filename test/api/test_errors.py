"""Every refusal of the front door: its type, and that its text names the thing and the way out."""

import copy
import gc
import importlib.metadata
import inspect
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from models import MLP, call, prepared_for, quantized
from torch import nn

import nc
from nc import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    InputError,
    NCError,
    NCWarning,
    StateError,
    StaticQuantConfig,
    UnknownBackendError,
    available_backends,
    convert,
    describe,
    errors,
    prepare,
    quantize,
)
from nc.backends.torchscript import script
from nc.graph.catalogue import name_operator

X = torch.randn(4, 16)
CONFIG = StaticQuantConfig()
STEPS = [pytest.param(prepare, id="prepare"), pytest.param(describe, id="describe")]


# ---- the tree ----


def test_every_error_is_an_ncerror_and_drawn_in_the_module_text():
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == "nc.errors"]
    for cls in classes:
        assert issubclass(cls, (NCError, UserWarning))
        assert cls.__name__ in errors.__doc__
        assert getattr(nc, cls.__name__) is cls
        assert cls.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("UnknownFieldError", TypeError),
        ("PatternError", ValueError),
        ("UnmatchedRuleError", ValueError),
        ("UnsupportedError", ValueError),
        ("InputError", ValueError),
        ("CaptureError", RuntimeError),
        ("StateError", RuntimeError),
        ("CalibrationError", ValueError),
        ("BackendError", RuntimeError),
        ("UnknownBackendError", ValueError),
        ("BackendUnavailableError", ImportError),
        ("VerificationError", RuntimeError),
        ("ArtefactError", ValueError),
        ("ArtefactMissingError", FileNotFoundError),
        ("ArtefactWriteError", OSError),
    ],
)
def test_errors_are_the_builtin_that_fits(name, builtin):
    assert issubclass(getattr(nc, name), builtin)


# ---- example inputs ----


@pytest.mark.parametrize("step", STEPS)
def test_example_inputs_are_missing(step):
    with pytest.raises(InputError, match="example_inputs is missing.*a tensor, a tuple .* or a dict"):
        step(MLP().eval(), CONFIG, backend="reference")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("example", [3, "text", X.numpy(), {X}])
def test_example_inputs_of_another_type(step, example):
    with pytest.raises(
        InputError, match=f"Expected example_inputs to be .*, but got {type(example).__name__}"
    ):
        step(MLP().eval(), CONFIG, example_inputs=example, backend="reference")


@pytest.mark.parametrize("example", [(X, X), {"y": X}, {}, ()])
def test_example_inputs_that_do_not_fit_forward(example):
    with pytest.raises(InputError, match=r"do not fit MLP\.forward\(x\)"):
        prepare(MLP().eval(), CONFIG, example_inputs=example, backend="reference")


@pytest.mark.parametrize("example", [(3,), {"x": None}, ([],)])
def test_example_inputs_without_a_tensor(example):
    with pytest.raises(InputError, match="hold no tensor"):
        prepare(MLP().eval(), CONFIG, example_inputs=example, backend="reference")


def test_example_inputs_on_another_device():
    with pytest.raises(InputError, match=r"on device meta.*\.cpu\(\)"):
        prepare(MLP().eval(), CONFIG, example_inputs=X.to("meta"), backend="reference")


def test_a_model_on_another_device():
    with pytest.raises(InputError, match=r"'fc1\.weight' is on device meta, so it has no values"):
        prepare(MLP().to("meta").eval(), CONFIG, example_inputs=X, backend="reference")


# ---- model and configuration ----


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", [None, MLP, lambda x: x])
def test_a_model_that_is_none(step, model):
    with pytest.raises(InputError, match=r"to be a torch\.nn\.Module, but got"):
        step(model, CONFIG, example_inputs=X, backend="reference")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("config", [None, {}, "int8", {"awkward": {}}, int])
def test_a_configuration_that_is_none(step, config):
    with pytest.raises(
        ConfigError, match=r"to be a configuration \(.*StaticQuantConfig, .* or a dict such as .*, but got"
    ):
        step(MLP().eval(), config, example_inputs=X, backend="reference")


def test_steps_out_of_order():
    prepared = prepared_for(MLP(), X)
    q = convert(prepared)
    for model in (prepared, q):
        with pytest.raises(StateError, match=f"is a {type(model).__name__} already; call prepare"):
            prepare(model, CONFIG, example_inputs=X, backend="reference")
    for part in (prepared, q, q.reference):
        with pytest.raises(StateError, match=f"contains a {type(part).__name__}; call prepare"):
            prepare(nn.Sequential(part, nn.ReLU()), CONFIG, example_inputs=X, backend="reference")
    with pytest.raises(StateError, match="is a ReferenceModule|contains a ReferenceModule"):
        prepare(q.reference, CONFIG, example_inputs=X, backend="reference")
    with pytest.raises(StateError, match="converted already"):
        convert(q)
    with pytest.raises(StateError, match="expects the result of prepare.., but got MLP"):
        convert(MLP())


def test_training_mode_is_said_once():
    model = nn.Sequential(nn.Dropout(), nn.Linear(16, 4), nn.Dropout()).train()
    with pytest.warns(NCWarning, match="in training mode; it is quantized as in eval mode") as caught:
        prepare(model, CONFIG, example_inputs=X, backend="reference")
    assert len([w for w in caught if w.category is NCWarning]) == 1
    assert caught[0].filename == __file__
    assert model.training


def test_training_mode_of_a_model_that_is_given_away():
    model = nn.Sequential(nn.Dropout(), nn.Linear(16, 4)).train()
    with pytest.warns(NCWarning, match="it stays in eval mode, because inplace=True"):
        prepare(model, CONFIG, inplace=True, example_inputs=X, backend="reference")
    assert not any(m.training for m in model.modules())


def test_results_stay_in_eval_mode():
    prepared = prepared_for(MLP(), X)
    q = convert(prepared)
    for model in (prepared, q, q.reference):
        with pytest.warns(NCWarning, match="stays in eval mode"):
            assert not model.train().training
        assert not model.eval().training


@pytest.mark.parametrize("kind", ["prepared", "quantized", "reference", "exported"])
def test_what_would_change_weights_is_refused(kind):
    prepared = prepared_for(MLP(), X)
    q = convert(prepared, measure=False)
    model = {
        "prepared": prepared,
        "quantized": q,
        "reference": q.reference,
        "exported": nc.export.export(MLP().eval(), X),
    }[kind]
    expected = model(X)
    for same in (
        model.to("cpu"),
        model.float(),
        model.cpu(),
        model.requires_grad_(False),
        model.to(torch.float32),
        model.eval(),
    ):
        assert same is model
        assert torch.equal(model(X), expected)
    for change in ("half", "double", "bfloat16", "cuda"):
        with pytest.raises(nc.UnsupportedError, match="can't be (cast to torch|moved)"):
            getattr(model, change)()
    for target in ("meta", torch.float16, "cuda"):
        with pytest.raises(nc.UnsupportedError, match="can't be (cast to torch|moved)"):
            model.to(target)
    for attempt in (
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: nn.Sequential(model).state_dict(),
    ):
        with pytest.raises(StateError, match="no state_dict"):
            attempt()
    with pytest.raises(StateError, match="no gradients"):
        model.requires_grad_()


def test_attributes_of_the_users_model():
    class Owner(MLP):
        def __init__(self):
            super().__init__()
            self.config, self.encoder = {"size": 3}, nn.Linear(2, 2)

        def generate(self):
            return 1

    model = Owner()
    prepared = prepared_for(model, X)
    assert prepared.config is model.config
    for name in ("generate", "encoder"):
        with pytest.raises(AttributeError, match=f"'{name}' belongs to the fp32 model"):
            getattr(prepared, name)
    q = convert(prepared, measure=False)
    for each, name in ((prepared, "nonsense"), (q, "config")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'. It has the signature"):
            getattr(each, name)
        assert not hasattr(each, name)
    assert copy.deepcopy(prepared).config is model.config
    del model
    gc.collect()
    assert not hasattr(prepared, "config")  # it does not keep the model in memory


def test_arguments_of_the_wrong_kind():
    with pytest.raises(InputError, match="run_fn=lambda prepared"):
        nc.quantize(MLP().eval(), CONFIG, [X], example_inputs=X)
    with pytest.raises(ConfigError, match=r"got the class StaticQuantConfig: write StaticQuantConfig\(\)"):
        prepare(MLP().eval(), nc.StaticQuantConfig, example_inputs=X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(16, 4)).eval())
    with pytest.raises(InputError, match="'0' is a Linear of torch.ao: the model is quantized already"):
        prepare(theirs, CONFIG, example_inputs=X)


# ---- backends ----


@pytest.mark.parametrize("step", STEPS)
def test_an_unknown_backend(step):
    with pytest.raises(
        UnknownBackendError,
        match="No backend is called 'tpu'; known: auto, ipex, native, openvino, reference",
    ):
        step(MLP().eval(), CONFIG, example_inputs=X, backend="tpu")


def test_an_unknown_backend_for_convert():
    with pytest.raises(UnknownBackendError, match="'tpu'"):
        convert(prepared_for(MLP(), X), backend="tpu")


def versions(monkeypatch, **installed):
    """Pretend that these versions are installed; None means not at all."""
    real = importlib.metadata.version

    def version(name):
        key = name.replace("-", "_")
        if key not in installed:
            return real(name)
        if installed[key] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[key]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("backend", ["ipex", "auto"])
def test_ipex_is_missing(monkeypatch, backend):
    versions(monkeypatch, intel_extension_for_pytorch=None)
    monkeypatch.setattr("nc.backends.native.NativeBackend.why_unavailable", lambda self: "no kernels")
    with pytest.raises(
        BackendUnavailableError, match="not installed: pip install torch==2.8.0 intel-extension"
    ) as caught:
        prepare(MLP().eval(), CONFIG, example_inputs=X, backend=backend)
    if backend == "auto":
        assert 'backend="reference"' in str(caught.value)


def test_auto_takes_the_next_engine_and_says_why(monkeypatch):
    versions(monkeypatch, intel_extension_for_pytorch=None)
    if available_backends()["native"]:
        pytest.skip(available_backends()["native"])
    monkeypatch.setattr("nc.backends.AUTO", ("ipex", "native"))
    monkeypatch.setattr("nc.backends.auto_order.RACES", ())
    prepared = prepare(MLP().eval(), CONFIG, example_inputs=X)
    prepared(X)
    q = convert(prepared)
    assert q.backend == "native"
    assert (
        "takes the first of ipex, native that can run here; ipex: intel-extension-for-pytorch is not "
        "installed" in q.report().summary()
    )
    assert not convert(prepared, backend="native").report().chosen


def test_torch_is_of_another_version(monkeypatch):
    versions(monkeypatch, intel_extension_for_pytorch="2.8.0", torch="2.9.1+cpu")
    with pytest.raises(
        BackendUnavailableError, match=r"2\.8\.0 needs torch 2\.8, but torch is 2\.9\.1.*pip install"
    ):
        prepare(MLP().eval(), CONFIG, example_inputs=X, backend="ipex")


def test_ipex_is_missing_at_convert(monkeypatch):
    prepared = prepared_for(MLP(), X)
    versions(monkeypatch, intel_extension_for_pytorch=None)
    with pytest.raises(BackendUnavailableError):
        convert(prepared, backend="ipex")
    assert convert(prepared)(X).shape == (4, 8)  # nothing was lost


def test_a_cpu_without_avx2(monkeypatch):
    from nc.kernels import cpu

    versions(monkeypatch, intel_extension_for_pytorch="2.8.0", torch="2.8.0+cpu")
    monkeypatch.setattr(cpu, "machine_features", lambda: ("sse4_2",))
    with pytest.raises(BackendUnavailableError, match="AVX2"):
        prepare(MLP().eval(), CONFIG, example_inputs=X, backend="ipex")


@pytest.mark.parametrize(
    ("features", "wide"),
    [
        ((), False),
        (("avx2",), False),
        (("avx2", "avx512f"), False),
        (("avx2", "avx512_vnni"), True),
        (("avx2", "avx_vnni"), True),
    ],
)
def test_narrow_sums_without_vnni(monkeypatch, features, wide):
    from nc.backends import get_backend
    from nc.kernels import cpu

    monkeypatch.setattr(cpu, "machine_features", lambda: features)
    capabilities = get_backend("ipex").capabilities()
    assert (("linear", "uint8") in capabilities.narrow_sums) is not wide
    assert (("conv2d", "int8") in get_backend("native").capabilities().narrow_sums) is not wide
    assert ("conv2d", "int8") not in capabilities.narrow_sums
    assert capabilities.isa == ((features[-1],) if wide else ("avx2",))
    # dynamic kernels are FBGEMM's, which does not use the VNNI of AVX2
    assert (("linear", "per_token") in capabilities.narrow_sums) is ("avx512_vnni" not in features)
    monkeypatch.setenv("FBGEMM_ENABLE_INSTRUCTIONS", "avx512")
    assert ("lstm", "per_tensor") in get_backend("ipex").capabilities().narrow_sums
    native = get_backend("native").capabilities().narrow_sums
    assert {("linear", "per_token"), ("lstm", "per_tensor"), ("gru_cell", "per_tensor")} <= native
    assert not native & {
        (kind, "per_token") for kind in ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")
    }  # nc's own C code


@pytest.mark.ipex
@pytest.mark.parametrize(("option", "value"), [("verify", "maybe"), ("isolate", "sometimes")])
def test_options_of_convert(option, value):
    with pytest.raises(ConfigError, match=f"Expected {option} to be one of .*, but got '{value}'"):
        convert(prepared_for(MLP(), X, backend="ipex"), **{option: value})


def test_an_operator_without_a_script_form_is_named():
    graph = torch.fx.Graph()
    graph.output((name_operator(graph.call_function(sorted, (graph.placeholder("x"),), name="odd_one")),))
    with pytest.raises(BackendError, match="sorted.*'odd_one'"):
        script(torch.fx.GraphModule(nn.Module(), graph))


# ---- nothing on the side ----

IMPORT = """
import sys
import nc
assert "intel_extension_for_pytorch" not in sys.modules
assert not any(m.split(".")[0] in ("transformers", "torchvision", "click", "rich") for m in sys.modules), "heavy imports"
nc.available_backends()
assert "intel_extension_for_pytorch" not in sys.modules
"""


def test_importing_nc_imports_no_engine():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_left_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quantize(MLP().eval(), CONFIG, lambda m: m(X), example_inputs=X, backend="reference").report()
    assert list(tmp_path.iterdir()) == []


def test_nothing_hangs_on_the_users_model():
    model = MLP().eval()
    before = set(vars(model)), {n: set(vars(m)) for n, m in model.named_modules()}
    quantized(model, X)
    assert (set(vars(model)), {n: set(vars(m)) for n, m in model.named_modules()}) == before
    assert call(model, X).shape == (4, 8)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_weights_that_are_not_finite_are_named(bad, parameter):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        getattr(model[1], parameter)[0] = bad
    with pytest.raises(InputError, match=rf"'1.{parameter}' of operator '1' holds NaN or infinite values"):
        prepare(model, StaticQuantConfig(), example_inputs=torch.randn(2, 4), backend="reference")
    prepare(model, StaticQuantConfig().exclude("1"), example_inputs=torch.randn(2, 4), backend="reference")


# ---- models that cannot be captured ----


class Sparse(nn.Module):
    """A product with a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("graph", torch.eye(4).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.graph, self.fc(x))


@pytest.mark.parametrize("step", STEPS)
def test_a_sparse_buffer(step):
    with pytest.raises(nc.CaptureError, match="Sparse can't be captured"):
        step(Sparse().eval(), CONFIG, example_inputs=torch.randn(4, 4), backend="reference")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_torchscript(inside):
    script = torch.jit.trace(nn.Linear(4, 4).eval(), torch.randn(2, 4))
    with pytest.raises(InputError, match=r"^(0|The model) is TorchScript"):
        prepare(
            nn.Sequential(script).eval() if inside else script,
            CONFIG,
            example_inputs=torch.randn(2, 4),
            backend="reference",
        )


def test_a_parameter_without_a_value():
    with pytest.raises(InputError, match=r"'0\.weight' has no value yet"):
        prepare(
            nn.Sequential(nn.LazyLinear(4)).eval(),
            CONFIG,
            example_inputs=torch.randn(2, 4),
            backend="reference",
        )


def test_a_report_of_no_model():
    with pytest.raises(nc.StateError, match=r"expects the result of convert\(\) or load\(\)"):
        nc.report(None)


@pytest.mark.parametrize(
    "dump", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch.save"]
)
def test_a_quantized_model_is_saved_by_nc_only(dump):
    q_model = quantized(MLP(), X, backend="reference")
    with pytest.raises(StateError, match="nc.save"):
        dump(q_model)
    with pytest.raises(StateError, match="nc.save"):
        dump(torch.nn.Sequential(q_model))
    for copied in (copy.copy(q_model), copy.deepcopy(q_model), copy.deepcopy(torch.nn.Sequential(q_model))):
        assert torch.equal(copied(X), q_model(X))


@pytest.mark.parametrize(
    "dump", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "torch.save"]
)
def test_a_prepared_model_is_not_pickled_but_copied(dump):
    prepared = prepare(MLP().eval(), CONFIG, example_inputs=X, backend="reference")
    prepared(X)
    with pytest.raises(StateError, match="statistics.save"):
        dump(prepared)
    expected = convert(prepared)(X)
    whole, shared = copy.deepcopy(prepared), copy.copy(prepared)
    shared(2 * X)
    assert torch.equal(convert(prepared)(X), convert(shared)(X)), "observers are shared"
    assert not torch.equal(convert(prepared)(X), expected)
    assert torch.equal(convert(whole)(X), expected)


@pytest.mark.parametrize(
    "config",
    [nc.StaticQuantConfig(), nc.WeightOnlyConfig("int4", group_size=8)],
    ids=["static", "weight-only"],
)
def test_another_default_device_is_refused_where_tensors_are_made(config, tmp_path):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    options = {"example_inputs": x, "backend": "reference"}
    prepared = nc.prepare(model, config, **options)
    prepared(x)
    q_model = nc.convert(prepared)
    nc.save(q_model, tmp_path / "model")
    steps = {
        "prepare": lambda: nc.prepare(model, config, **options),
        "describe": lambda: nc.describe(model, config, **options),
        "convert": lambda: nc.convert(prepared),
        "load": lambda: nc.load(tmp_path / "model", model=model, backend="reference"),
    }
    expected = q_model(x)
    with torch.device("meta"):
        for name, step in steps.items():
            with pytest.raises(nc.StateError, match=rf"^{name}\(\) .* default device is meta"):
                step()
        with torch.device("cpu"):
            assert torch.equal(steps["load"]()(x), expected)
        assert torch.equal(q_model(x), expected), "a call makes none"


def observed(model):
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    return torch.ao.quantization.prepare(model)


def trained(model):
    model.train().qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model).eval()


@pytest.mark.parametrize("made", [observed, trained])
@pytest.mark.parametrize("config", [nc.StaticQuantConfig(), nc.WeightOnlyConfig(group_size=16)])
def test_models_that_torch_ao_prepared_are_refused_as_such(made, config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = made(nn.Sequential(nn.Linear(16, 16)).eval())
    with pytest.raises(
        InputError, match=r"of torch\.ao: .*quantized already, or prepared for it.*fp32 model"
    ):
        nc.prepare(theirs, config, example_inputs=torch.randn(2, 16))


def test_parameters_that_torchao_quantized_are_refused(monkeypatch):
    class Theirs(torch.Tensor):
        pass

    model = nn.Sequential(nn.Linear(16, 16))
    monkeypatch.setattr(Theirs, "__module__", "torchao.quantization")
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Theirs))
    with pytest.raises(InputError, match=r"'0.weight' is a Theirs, which is quantized already"):
        nc.prepare(model.eval(), nc.StaticQuantConfig(), example_inputs=torch.randn(2, 16))
