"""Random graphs of what models are made of go from capture to the reference and to each engine, and agree.

`NC_RANDOM_GRAPHS=<n>` runs so many of each test instead of a few.
"""

import os
import tempfile
import warnings

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from models import assert_close, call, worst_db
from programs import program

from nc import (
    BackendError,
    DynamicQuantConfig,
    InputError,
    SmoothQuantConfig,
    StaticQuantConfig,
    VerificationError,
    available_backends,
    compare,
    convert,
    load,
    prepare,
)
from nc.backends.verify import FLOOR_DB

GRAPHS = int(os.environ.get("NC_RANDOM_GRAPHS", "15"))
WHY_NO_NATIVE = available_backends()["native"]
many = hypothesis.settings(
    max_examples=GRAPHS, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
randoms = st.randoms(use_true_random=False, note_method_calls=False)


def check(model, backend, config, store=False):
    """Everything that must hold for one model; raises what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "no dimension could stay free", "training mode", deprecations
        # some have nothing that a strategy quantizes, which is an error with strict
        prepared = prepare(model, config, example_inputs=model.inputs, backend=backend, strict=False)
        assert_close(call(model, copies(model.inputs)), call(prepared, copies(model.inputs)), 1e-4)
        q = convert(prepared, isolate="never", measure=False)
        expected, got = call(q.reference, copies(model.inputs)), call(q, copies(model.inputs))
        assert worst_db(expected, got) >= max(FLOOR_DB, min(20.0, q.graph.sqnr_vs_fp32_db - 5.0))
        twice = tuple(
            torch.cat([t, 0.9 * t.flip(0)]) for t in model.inputs
        )  # equal rows would be ties to argmax
        try:
            call(model, copies(twice))
            expected, got = call(q.reference, copies(twice)), call(q, copies(twice))
        except (InputError, RuntimeError):
            pass  # the model, or what was captured, takes one batch size only
        else:
            assert_close(call(model, copies(twice)), call(prepared, copies(twice)), 1e-4)
            assert worst_db(expected, got) >= max(FLOOR_DB, min(15.0, q.graph.sqnr_vs_fp32_db - 8.0))
        q.report()
        if store:
            with tempfile.TemporaryDirectory() as folder:
                q.save(f"{folder}/q")
                assert_close(
                    call(q, copies(model.inputs)),
                    call(load(f"{folder}/q", backend=backend), copies(model.inputs)),
                    1e-5,
                )
            compare(q, inputs=copies(model.inputs))


def copies(inputs):
    return tuple(t.clone() for t in inputs)


@pytest.mark.parametrize(
    "config",
    [StaticQuantConfig(), SmoothQuantConfig(), DynamicQuantConfig()],
    ids=["static", "smooth", "dynamic"],
)
@pytest.mark.skipif(bool(WHY_NO_NATIVE), reason=WHY_NO_NATIVE or "it can run")
@pytest.mark.sample(1)
def test_native_agrees(config):
    @many
    @hypothesis.given(randoms, st.booleans(), st.booleans())
    def run(rng, in_place, store):
        check(program(rng, in_place=in_place), "native", config, store)

    run()


@pytest.mark.ipex
@pytest.mark.exhaustive
def test_ipex_agrees_or_says_what_to_do():
    """Half of all odd graphs are too odd for IPEX's fuser; what it takes, it must compute."""
    outcomes = []

    @many
    @hypothesis.given(randoms)
    def run(rng):
        model = program(rng, steps=5)
        try:
            check(model, "ipex", StaticQuantConfig())
        except VerificationError as error:
            outcomes.append(str(error))
        except BackendError as error:
            outcomes.append(str(error))
            assert "set_local(" in str(error)
        else:
            outcomes.append("")

    run()
    assert outcomes.count("") > 0.7 * len(outcomes), outcomes
