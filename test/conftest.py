"""What every test gets: a seed that a failure prints, no network, and IPEX tests skipped where IPEX can't run."""

import os
import random
import socket

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read when transformers is imported

pytest.register_assert_rewrite("models", "suites")

import hypothesis
import torch

from nc.backends import get_backend

hypothesis.settings.register_profile("nc", deadline=None, max_examples=50, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("nc")

WHY_NO_IPEX = get_backend("ipex").why_unavailable()


def pytest_report_header():
    return f"IPEX tests are skipped: {WHY_NO_IPEX}" if WHY_NO_IPEX else "IPEX tests run"


#: Open faults, each loud: convert() raises VerificationError on the first, the others name a neighbour of the operator at fault.
OPEN_FAULTS = {
    "TestIpex": ("[broadcast]", "IPEX adds a broadcast fp32 operand to a convolution wrongly; convert() refuses the model"),
    "test_an_engine_that_disagrees_is_an_error_that_names_the_operator": ("", "bisection names a neighbour of the operator"),
    "test_a_disagreement_can_be_a_warning": ("", "bisection names a neighbour of the operator"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        for owner, (case, reason) in OPEN_FAULTS.items():
            if owner in item.nodeid and item.nodeid.endswith(case):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
    if WHY_NO_IPEX:
        for item in items:
            if item.get_closest_marker("ipex"):
                item.add_marker(pytest.mark.skip(reason=WHY_NO_IPEX))


@pytest.fixture(autouse=True)
def seed(request):
    """Another one in each run; `NC_TEST_SEED=<n>` repeats a failure."""
    value = int(os.environ.get("NC_TEST_SEED", random.SystemRandom().randrange(2**31)))
    torch.manual_seed(value)
    random.seed(value)
    request.node.user_properties.append(("seed", value))
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        value = dict(item.user_properties).get("seed")
        report.sections.append(("seed", f"repeat with NC_TEST_SEED={value}"))
    return report


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Models and data ship inside packages; a connection to anywhere is a bug."""

    def refuse(self, address):
        msg = f"a test tried to connect to {address!r}"
        raise AssertionError(msg)

    real = socket.socket.connect
    socket.socket.connect = refuse
    yield
    socket.socket.connect = real
