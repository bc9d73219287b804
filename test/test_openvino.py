"""The OpenVINO backend: the common suite on OpenVINO's CPU plugin."""

import pytest
from suites.backend_suite import MODELS, BackendSuite

from nc import available_backends

pytestmark = pytest.mark.skipif(bool(available_backends()["openvino"]), reason=available_backends()["openvino"] or "it can run")


class TestOpenVINO(BackendSuite):
    backend = "openvino"
    without_kernel = ("matmul",)

    @pytest.mark.parametrize("name", MODELS)
    def test_what_was_asked_runs_in_int8(self, converted, name):
        _, q = converted(name)
        report = q.report()
        assert {op.operator for op in report.not_int8} == set()
        assert report.sqnr_db >= self.agreement
