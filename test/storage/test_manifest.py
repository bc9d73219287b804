"""The record of a folder: what is missing, altered or more is known."""

import pytest

from nc import ArtefactCorruptError, ArtefactMissingError, ArtefactSchemaError
from nc.storage import manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "inner" / "größe.txt").write_text("b")
    manifest.write(tmp_path)
    return tmp_path


def test_a_whole_folder_is_ours(folder):
    assert manifest.is_ours(folder)
    manifest.check(folder)
    (folder / "a.txt").unlink()
    assert manifest.is_ours(folder)
    with pytest.raises(ArtefactMissingError, match=r"a\.txt is missing"):
        manifest.check(folder)


@pytest.mark.parametrize("name", ["notes.txt", "inner/notes.txt", "link"])
def test_a_folder_with_a_file_of_the_user_is_not(folder, name):
    (folder / name).symlink_to("a.txt") if name == "link" else (folder / name).write_text("mine")
    assert not manifest.is_ours(folder)
    manifest.check(folder)


def test_a_file_that_was_altered(folder):
    (folder / "inner" / "größe.txt").write_text("c")
    with pytest.raises(ArtefactCorruptError, match=r"größe\.txt is not as it was written"):
        manifest.check(folder)


def test_a_record_of_a_newer_nc_and_a_damaged_one(folder):
    path = folder / manifest.NAME
    text = path.read_text()
    path.write_text(text.replace('"schema": 1', '"schema": 2'))
    for function in (manifest.is_ours, manifest.check):
        with pytest.raises(ArtefactSchemaError, match="a newer nc wrote it"):
            function(folder)
    for damaged in (
        text[:50],
        "null",
        text.replace('"size": 1', '"size": "1"'),
        text.replace("nc-folder", "x"),
    ):
        path.write_text(damaged)
        assert not manifest.is_ours(folder)
        with pytest.raises(ArtefactCorruptError, match="nc_files"):
            manifest.check(folder)
