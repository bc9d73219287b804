"""What every test gets: a seed of its own, no network, and IPEX tests skipped where IPEX can't run."""

import collections
import os
import random
import socket
import zlib
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read when transformers is imported
# Read when torch is imported. By default idle OpenMP threads spin, and several test processes on few cores
# take each other's time so.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest.register_assert_rewrite("models", "suites")

import hypothesis
import torch
from models import WHY_NO_PLANS, library

from nc.backends import get_backend
from nc.process.unavailable import Unavailable

hypothesis.settings.register_profile("nc", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("nc")

#: Folders whose tests depend on neither torch's version nor IPEX; of the files in test/ itself none does.
ONCE = (
    "algorithms",
    "tuning",
    "backends/low_bit",
    "backends/native",
    "backends/openvino",
    "benchmarks",
    "calibration",
    "ci",
    "cli",
    "config",
    "examples",
    "formats",
    "graph",
    "interchange",
    "kernels",
    "numerics",
    "observers",
    "parity",
    "planning",
    "process",
    "profiling",
    "proof",
    "reports",
    "storage",
    "text",
    "weights",
)
WHY_NO_IPEX = get_backend("ipex").why_unavailable()


def pytest_addoption(parser):
    parser.addoption(
        "--share", type=int, default=1, metavar="N", help="run every Nth test, chosen by their names"
    )
    parser.addoption("--turn", type=int, default=0, metavar="K", help="which of the N shares")


def pytest_report_header():
    ipex = f"IPEX tests are skipped: {WHY_NO_IPEX}" if WHY_NO_IPEX else "IPEX tests run"
    return [ipex, f"tests of plans are skipped: {WHY_NO_PLANS}" if WHY_NO_PLANS else f"plans use {library()}"]


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config, items):
    _mark_samples(items)
    for item in items:
        if _is_once(
            item.path.parent.relative_to(Path(__file__).parent), item.get_closest_marker("ipex") is not None
        ):
            item.add_marker(pytest.mark.once)
    share = config.getoption("share")
    turn = config.getoption("turn") % share
    config.hook.pytest_deselected(items=[item for item in items if _place(item) % share != turn])
    items[:] = [item for item in items if _place(item) % share == turn]
    for marker, why in (("ipex", WHY_NO_IPEX), ("needs_plans", WHY_NO_PLANS)):
        for item in items if why else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collectstart(collector):
    """Models that a module builds while it is imported are the same in every run too."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(_hash(collector.nodeid))


def _is_once(folder, ipex):
    """Whether tests of a folder, relative to test/, need not run with each torch.

    Those that need IPEX run with its torch.
    """
    parts = ("/".join(folder.parts[:1]), "/".join(folder.parts[:2]))
    return not ipex and (not folder.parts or any(part in ONCE for part in parts))


def _place(item):
    """A number that depends on the name of a test alone."""
    return _hash(item.nodeid)


def _hash(nodeid):
    """A number that depends on the names of a file and a test, not on the folder of the file."""
    file, separator, name = nodeid.partition("::")
    return zlib.crc32(f"test/{file.rpartition('/')[2]}{separator}{name}".encode())


def _mark_samples(items):
    """Which cases are in the sample depends on their names alone, so a product of parameters is not cut along one of them."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        (count,) = group[0].get_closest_marker("sample").args
        for item in sorted(group, key=_place)[count:]:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def seed(request):
    """Each test's own, the same in every run; `NC_TEST_SEED=<n>` tries another."""
    value = int(os.environ.get("NC_TEST_SEED", _hash(request.node.nodeid)))
    torch.manual_seed(value)
    random.seed(value)
    request.node.user_properties.append(("seed", value))
    return value


@pytest.fixture(autouse=True)
def no_time_to_measure(monkeypatch):
    """`convert` makes one call of each model, and takes none apart."""
    monkeypatch.setattr("nc.backends.verdict.SECONDS", 0.0)


@pytest.fixture
def without_c(monkeypatch):
    """As where the C code of low-bit kernels can't be compiled."""
    for module in ("compiled", "compiled_blocks"):
        monkeypatch.setattr(
            f"nc.kernels.low_bit.{module}._code",
            lambda: Unavailable("its C code can't be loaded: there is no C compiler"),
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        value = dict(item.user_properties).get("seed")
        report.sections.append(("seed", f"repeat with NC_TEST_SEED={value}"))
    return report


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Models and data ship inside packages; a connection to anywhere but this machine is a bug."""
    real = socket.socket.connect

    def refuse(self, address):
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
            return real(self, address)
        msg = f"a test tried to connect to {address!r}"
        raise AssertionError(msg)

    socket.socket.connect = refuse
    yield
    socket.socket.connect = real
