"""The list of hand-made faults fits the code.

`make mutations` runs for hours, and must not stop for an old entry.
"""

import pytest
from mutations import MUTATIONS, ROOT, files_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_text_stands_exactly_once_in_its_file(mutation):
    path = ROOT / "nc" / mutation.file
    assert path.read_text(encoding="utf-8").count(mutation.text) == 1, (
        f"bring test/mutations.py up to date with {path}"
    )
    assert mutation.fault != mutation.text


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_test_files_that_should_notice_it_exist(mutation):
    assert mutation.tests
    assert [name for name in mutation.tests if len(files_of(name)) != 1] == []


def test_names_are_told_apart():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
