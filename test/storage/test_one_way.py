"""There is one way to write files, and one to read JSON."""

import re

import pytest
from models import TEST

#: Where a file or folder is written: the mechanism itself, and what writes into a folder that it gave.
WRITERS = {
    "nc/storage/atomic.py": "the mechanism",
    "nc/storage/marks.py": "a mark, in a file that is not at its place yet",
    "nc/storage/folder.py": "into the folder of the mechanism",
    "nc/storage/tensor_file.py": "at a path that callers get from the mechanism",
    "nc/kernels/c_code/flags.py": "beside what is compiled, in a temporary folder",
    "nc/kernels/c_code/build.py": "in a temporary folder",
    "nc/backends/profile_process.py": "in a temporary folder",
    "nc/backends/base.py": "in the temporary folder of an export",
    "nc/backends/native/package.py": "in the temporary folder of an export",
    "nc/backends/native/runner_folder.py": "in the temporary folder of an export",
    "nc/interchange/gguf_writer.py": "into the file of the mechanism",
    "nc/hf/checksums.py": "into the file of the mechanism",
    "nc/hf/export.py": "into the folder of the mechanism",
}
_WRITE = re.compile(
    r"""\.write_(?:text|bytes)\(|\.open\(["'](?:w|a|x|r\+)|[^.\w]open\([^)]*["'](?:w|a|x)b?["']"""
)
SOURCES = sorted((TEST.parent / "nc").rglob("*.py"))


def _named(path):
    return path.relative_to(TEST.parent).as_posix()


def test_files_are_written_in_known_places_only():
    found = {_named(path) for path in SOURCES if _WRITE.search(path.read_text(encoding="utf-8"))}
    assert found <= set(WRITERS), "write with nc.storage.atomic"
    assert found >= set(WRITERS) - {"nc/storage/tensor_file.py"}, "no longer writes: take it out"


@pytest.mark.parametrize("path", SOURCES, ids=_named)
def test_json_is_read_by_one_reader(path):
    """Others know no limits: numbers that no float holds, lists in lists, keys that occur twice."""
    text = path.read_text(encoding="utf-8")
    # a process that has no nc on its path yet gets its path from its parent
    expected = {"nc/text/json_text.py": 1, "nc/process/spawn.py": 1}.get(_named(path), 0)
    assert len(re.findall(r"json\.loads?\(|JSONDecoder\(", text)) == expected
