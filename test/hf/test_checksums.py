"""The table of a folder: what is missing, altered or more is known."""

import pytest

from nc import ArtefactCorruptError, ArtefactMissingError, ArtefactSchemaError
from nc.hf import checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "inner" / "größe.txt").write_text("b")
    checksums.write(tmp_path)
    return tmp_path


def test_a_whole_folder_is_ours(folder):
    assert checksums.is_ours(folder)
    checksums.check(folder)
    (folder / "a.txt").unlink()
    assert checksums.is_ours(folder)
    with pytest.raises(ArtefactMissingError, match=r"a\.txt is missing"):
        checksums.check(folder)


@pytest.mark.parametrize("name", ["notes.txt", "inner/notes.txt", "link"])
def test_a_folder_with_a_file_of_the_user_is_not(folder, name):
    (folder / name).symlink_to("a.txt") if name == "link" else (folder / name).write_text("mine")
    assert not checksums.is_ours(folder)
    checksums.check(folder)


def test_a_file_that_was_altered(folder):
    (folder / "inner" / "größe.txt").write_text("c")
    with pytest.raises(ArtefactCorruptError, match=r"größe\.txt is not the file that was saved"):
        checksums.check(folder)


def test_a_record_of_a_newer_nc_and_a_damaged_one(folder):
    path = folder / checksums.TABLE
    text = path.read_text()
    path.write_text(text.replace('"schema": 1', '"schema": 2'))
    for function in (checksums.is_ours, checksums.check):
        with pytest.raises(ArtefactSchemaError, match="a newer version of nc"):
            function(folder)
    for damaged in (
        text[:50],
        "null",
        text.replace('"size": 1', '"size": "1"'),
    ):
        path.write_text(damaged)
        assert not checksums.is_ours(folder)
        with pytest.raises(ArtefactCorruptError, match="nc_checksums"):
            checksums.check(folder)
