"""Real architectures, with random weights, go the whole way: prepare, calibrate, convert, on both backends.

Bounds are in dB of quantized against fp32 output, a few dB below what was seen; a lost operator or a wrong
scale costs 10 dB and more.
"""

import os

import pytest
import torch
from models import assert_close, call, worst_db
from suites.architectures import CASES, text

from nc import StaticQuantConfig, available_backends, compare, convert, prepare

PARAMETERS = [
    pytest.param(name, marks=pytest.mark.exhaustive if case.exhaustive else ())
    for name, case in CASES.items()
]


@pytest.fixture
def case(name):
    torch.manual_seed(0)  # the bounds were found with these weights and inputs
    return CASES[name]


@pytest.fixture
def model(case):
    model = case.build().eval()
    for parameter in model.parameters():
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # torchvision starts some heads at zero
    return model


def others(case):
    """Inputs of another batch size, and for text of another length too."""
    return [case.inputs(3), case.inputs(2, 7)] if case.inputs is text else [case.inputs(3)]


def prepared_and_checked(model, case, backend):
    """Prepared on one sample, equal to fp32 for it and for other sizes, calibrated on more."""
    example = case.inputs(1)
    prepared = prepare(model, StaticQuantConfig(), example_inputs=example, backend=backend)
    for inputs in (example, *others(case)):
        expected, got = call(model, inputs), call(prepared, inputs)
        assert type(got) is type(expected)
        assert_close(expected, got, 1e-4)
    call(prepared, case.inputs(8))
    return prepared, [example, *others(case)]


@pytest.mark.parametrize("name", PARAMETERS)
def test_reference(case, model):
    prepared, examples = prepared_and_checked(model, case, "reference")
    quantized = convert(prepared)
    for inputs in examples:
        assert worst_db(call(model, inputs), call(quantized, inputs)) > case.decibels


@pytest.mark.ipex
@pytest.mark.parametrize("name", PARAMETERS)
def test_ipex(case, model):
    prepared, examples = prepared_and_checked(model, case, "ipex")
    quantized = convert(prepared, isolate="never")
    for inputs in examples:
        expected, got = call(model, inputs), call(quantized, inputs)
        assert type(got) is type(expected)
        assert worst_db(expected, got) > case.decibels
        assert worst_db(call(quantized.reference, inputs), got) >= 30
    report = quantized.report()
    assert {op.operator for op in report.not_int8} == set(case.fp32)
    assert all(op.reason for op in report.not_int8)
    assert report.ran_int8 > 0
    assert report.groups > 0


#: Minutes and gigabytes each: IPEX compiles them anew for every group of tensors that it is asked to show.
#: "resnet" and "vit" stand in, unless NC_LARGE=1 is set.
LARGE_FOR_IPEX = ("resnet18", "resnet50", "mobilenet_v2", "efficientnet_b0", "vit_b_16")


@pytest.mark.parametrize("engine", [name for name in ("ipex", "native") if not available_backends()[name]])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bert", "resnet") else pytest.mark.exhaustive)
        for name in CASES
    ],
)
def test_no_operator_disagrees(name, case, model, engine):
    """Tensor by tensor, at another size than the engine was warmed up with."""
    if engine == "ipex" and name in LARGE_FOR_IPEX and not os.environ.get("NC_LARGE"):
        pytest.skip("IPEX takes minutes for each; NC_LARGE=1 runs them")
    prepared = prepare(model, StaticQuantConfig(), example_inputs=case.inputs(1), backend=engine)
    call(prepared, case.inputs(8))
    found = compare(convert(prepared, isolate="never"), inputs=others(case)[-1], isolate="never")
    assert found.disagreements == (), found
    assert len(found.tensors) > len(found.unread)
