"""Arguments of all public functions that take the same things: one typed error, and no file anywhere."""

import pytest
import torch

import nc
import nc.hf
from nc.errors import ArtefactError, ConfigError, InputError
from nc.interchange import export_weights, import_weights, read_weights
from nc.tuning.front import Front, FrontPoint
from nc.tuning.trials import Result

X = torch.zeros(2, 4)
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
DYNAMIC = nc.DynamicQuantConfig()
LOW_BIT = nc.WeightOnlyConfig("int8", group_size=-1)
SETTINGS = nc.TuningConfig(config_set=DYNAMIC)
HUGE = 10**400


def run(prepared):
    prepared(X)


def front():
    values = {"metric": 1.0, "sqnr_db": 30.0, "spread": (1.0, 1.1), "weight_bytes": 1}
    points = [
        FrontPoint(name=name, config=DYNAMIC, result=Result(ms=ms, fp32_ratio=2 / ms, **values), drop=0.0)
        for name, ms in (("fp32", 2.0), ("int8", 1.0))
    ]
    return Front(measured=tuple(points))


def prepared(config=DYNAMIC):
    return nc.prepare(MODEL, config, example_inputs=X)


def quantized():
    return nc.convert(nc.prepare(MODEL, DYNAMIC, example_inputs=X, backend="reference"), measure=False)


RUN_FN = (
    "Expected run_fn to be a function that is called with the prepared model, but got a list. For a list of"
)
PROGRESS = (
    "Expected progress to be a function that is told how far the work is, False or None, but got an int"
)
CASES = {
    "quantize run_fn": (lambda: nc.quantize(MODEL, DYNAMIC, [X], example_inputs=X), InputError, RUN_FN),
    "tune run_fn": (lambda: nc.tune(MODEL, X, [X]), InputError, RUN_FN),
    "tune no run_fn": (lambda: nc.tune(MODEL, X, None), InputError, "needs calibration data"),
    "autoquant run_fn": (lambda: nc.autoquant(MODEL, X, run_fn=[X]), InputError, RUN_FN),
    "autotune run_fn": (lambda: nc.autotune(MODEL, SETTINGS, run, run_fn=[X]), InputError, RUN_FN),
    "tune metric": (lambda: nc.tune(MODEL, X, run, 3), InputError, "Expected metric to be a function .* an int"),
    "autotune eval_fn": (lambda: nc.autotune(MODEL, SETTINGS, 3), InputError, "Expected eval_fn to be a func"),
    "autotune no eval_fn": (lambda: nc.autotune(MODEL, SETTINGS, None), InputError, "but got None"),
    "sampler": (lambda: nc.TuningConfig(config_set=DYNAMIC, sampler=3), InputError, "Expected sampler to be"),
    "quantize progress": (lambda: nc.quantize(MODEL, DYNAMIC, None, example_inputs=X, progress=3), InputError,
                          PROGRESS),
    "convert progress": (lambda: nc.convert(prepared(), progress=3), InputError, PROGRESS),
    "tune progress": (lambda: nc.tune(MODEL, X, run, progress=3), InputError, PROGRESS),
    "autoquant progress": (lambda: nc.autoquant(MODEL, X, progress=3), InputError, PROGRESS),
    "mix that is a tensor": (lambda: nc.tune(MODEL, X, run, mix=X), InputError, "Expected mix to be a list"),
    "mix that is a dict": (lambda: nc.tune(MODEL, X, run, mix={"x": X}), InputError, "Expected mix to be a list"),
    "empty mix": (lambda: nc.tune(MODEL, X, run, mix=[]), InputError, "Expected mix to be a list"),
    "budget": (lambda: nc.tune(MODEL, X, run, budget=HUGE), ConfigError, "budget=1000"),
    "text of a budget": (lambda: nc.tune(MODEL, X, run, budget="9" * 400 + "x"), ConfigError, "budget="),
    "target_bits": (lambda: nc.tune(MODEL, X, run, target_bits=HUGE), ConfigError, "target_bits=1000"),
    "candidates": (lambda: nc.tune(MODEL, X, run, candidates=3), ConfigError, "candidates=3: expected"),
    "one candidate": (lambda: nc.tune(MODEL, X, run, candidates=DYNAMIC), ConfigError, "in a list, or by name"),
    "candidates that are a text": (lambda: nc.tune(MODEL, X, run, candidates="auto"), ConfigError, "in a list"),
    "empty trials": (lambda: nc.tune(MODEL, X, run, trials=""), InputError, "Expected trials to be a path"),
    "trials": (lambda: nc.tune(MODEL, X, run, trials=3), InputError, "Expected trials to be a path, but got an"),
    "cache": (lambda: nc.autoquant(MODEL, X, cache=3), InputError, "Expected cache to be a path"),
    "empty cache": (lambda: nc.autoquant(MODEL, X, cache=""), InputError, "Expected cache to be a path"),
    "load": (lambda: nc.load(None), InputError, "Expected model_name_or_path to be a path, but got a NoneType"),
    "load zero": (lambda: nc.load("a\0b"), InputError, "to be a path"),
    "load long": (lambda: nc.load("a" * 300), InputError, "to be a path"),
    "load half a letter": (lambda: nc.load("\ud800"), InputError, "to be a path"),
    "save long": (lambda: nc.save(MODEL, "a/" * 3000), InputError, "to be a path"),
    "export_model": (lambda: nc.export_model(quantized(), None, "onnx"), InputError, "Expected path to be a path"),
    "export_onnx": (lambda: nc.export_onnx(quantized(), ""), InputError, "Expected path to be a path"),
    "export_pt2": (lambda: nc.export_pt2(quantized(), 3), InputError, "Expected path to be a path"),
    "export_weights": (lambda: export_weights({}, ""), InputError, "Expected path to be a path"),
    "read_weights": (lambda: read_weights(None), InputError, "Expected path to be a path"),
    "import_weights": (lambda: import_weights(MODEL, "a"), InputError, "to be a path, but got a Sequential"),
    "statistics": (lambda: prepared().statistics.save(None), InputError, "Expected path to be a path"),
    "statistics read": (lambda: prepared().statistics.load(3), InputError, "Expected path to be a path"),
    "calls": (lambda: prepared(LOW_BIT).statistics.save(""), InputError, "Expected path to be a path"),
    "calls read": (lambda: prepared(LOW_BIT).statistics.load(None), InputError, "Expected path to be a path"),
    "report": (lambda: quantized().report().save(None), InputError, "Expected path to be a path"),
    "hf.quantize": (lambda: nc.hf.quantize(MODEL, [], None), InputError, "Expected out to be a path"),
    "hf.quantize model": (lambda: nc.hf.quantize("", [], "a"), InputError, "Expected model to be a path"),
    "hf.load": (lambda: nc.hf.load(None), InputError, "Expected folder to be a path"),
    "hf.load_sentence_transformer": (lambda: nc.hf.load_sentence_transformer(3), InputError,
                                     "Expected folder to be a path"),
    "hf.quantize_sentence_transformer": (lambda: nc.hf.quantize_sentence_transformer(MODEL, ["a"], ""), InputError,
                                         "Expected out to be a path"),
    "hf.export": (lambda: nc.hf.export("a", None, "gptq"), InputError, "Expected out to be a path"),
    "accelerate_generation": (lambda: nc.accelerate_generation(3), InputError, "int is not a language model"),
    "save": (lambda: nc.save(MODEL, None), InputError, "Expected checkpoint_dir to be a path"),
    "front without a folder": (lambda: front().save("no/such/f.json"), ArtefactError, "there is no folder"),
    "configuration": (lambda: DYNAMIC.to_json_file(None), InputError, "Expected path to be a path"),
    "configuration read": (lambda: nc.AutoConfig.from_json_file(""), InputError, "Expected path to be a path"),
    "front": (lambda: front().save(None), InputError, "Expected path to be a path"),
    "max_drop": (lambda: front().fastest(max_drop=HUGE), ConfigError, "max_drop=1000"),
    "field of a configuration": (lambda: nc.StaticQuantConfig(percentile=HUGE), ConfigError, "percentile"),
    "AutoConfig": (lambda: nc.AutoConfig(least_gain=HUGE), ConfigError, "least_gain"),
    "tolerable_loss": (lambda: nc.TuningConfig(DYNAMIC, tolerable_loss=HUGE), ConfigError, "tolerable_loss"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_argument_is_a_typed_error_and_writes_nothing(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, error, says = CASES[case]
    with pytest.raises(error, match=says) as caught:
        call()
    assert len(str(caught.value)) < 1000
    assert not list(tmp_path.iterdir())


def test_an_infinite_limit_is_one():
    assert front().fastest(max_drop=float("inf")).name != "fp32"
