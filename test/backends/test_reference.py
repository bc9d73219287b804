"""The reference backend: the QDQ graph itself."""

import math

from suites.backend_suite import BackendSuite


class TestReference(BackendSuite):
    backend = "reference"
    agreement = math.inf  # it is the graph

    def test_report_says_that_it_only_simulates(self, converted):
        _, q = converted("mlp")
        report = q.report()
        assert report.ran_int8 == 0
        assert report.groups is None
        assert report.sqnr_db is None
        assert all("simulated" in op.reason for op in report.not_int8)
