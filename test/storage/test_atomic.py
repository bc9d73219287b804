"""Files and folders that are there as a whole or not at all: whose error it is when they are not."""

import errno
import shutil

import pytest
from safetensors import SafetensorError

from nc.errors import ArtefactWriteError, InputError
from nc.storage.atomic import replaced, replaced_folder

WAYS = pytest.mark.parametrize("way", [replaced, replaced_folder])


def nothing_is_left(folder):
    return not list(folder.iterdir())


@WAYS
@pytest.mark.parametrize(
    "error",
    [
        OSError("no data here"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "data.csv"),
        PermissionError(errno.EACCES, "Permission denied", "/data/x.npz"),
        OSError(errno.ENOSPC, "No space left on device", "/data/x.npz"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("the data base"),
        InputError("no such input"),
        ValueError("another"),
    ],
    ids=repr,
)
def test_errors_of_other_code_in_the_block_stay_as_they_are(tmp_path, way, error):
    with pytest.raises(type(error)) as caught, way(tmp_path / "out", lambda _: False):
        raise error
    assert caught.value is error
    assert nothing_is_left(tmp_path)


@WAYS
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS], ids=errno.errorcode.get
)
def test_disks_that_are_full_or_broken_need_no_name(tmp_path, way, number):
    with (
        pytest.raises(ArtefactWriteError, match="out cannot be written: the disk"),
        way(tmp_path / "out", lambda _: False),
    ):
        raise OSError(number, "the disk")
    assert nothing_is_left(tmp_path)


@WAYS
@pytest.mark.parametrize("error", [SafetensorError("full"), shutil.Error("not copied")], ids=repr)
def test_errors_of_what_only_writes_are_those_of_writing(tmp_path, way, error):
    with (
        pytest.raises(ArtefactWriteError, match="out cannot be written"),
        way(tmp_path / "out", lambda _: False),
    ):
        raise error
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("inside", ["", "a/b.json"])
def test_errors_that_name_the_folder_are_those_of_writing(tmp_path, inside, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in (tmp_path, ""):
        with (
            pytest.raises(ArtefactWriteError, match="out cannot be written: Permission denied"),
            replaced_folder("out", lambda _: False) as staged,
        ):
            named = (staged / inside).relative_to(tmp_path)
            raise PermissionError(errno.EACCES, "Permission denied", str(root / named if root else named))
        assert nothing_is_left(tmp_path)


def test_the_errors_before_and_after_the_block_are_those_of_writing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactWriteError), replaced(tmp_path / "file" / "out", lambda _: False):
        pytest.fail("the block has begun")
    with (
        pytest.raises(ArtefactWriteError, match="out cannot be written: No such file"),
        replaced(tmp_path / "out", lambda _: False),
    ):
        pass  # writes nothing
