"""Numbers that were tuned: each can be measured again, and sizes of caches are asked for."""

import dataclasses
import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nc.kernels import caches, tuning

ROOT = Path(__file__).parents[2]
ROWS = {name: row for name, row in vars(tuning).items() if isinstance(row, tuning.Tuned)}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_where_and_when_it_was_measured_and_how_it_is_again(name):
    row = ROWS[name]
    assert all(dataclasses.asdict(row).values())
    assert datetime.date.fromisoformat(row.date) > datetime.date(2026, 1, 1)
    script = ROOT / row.measure.split()[1]
    assert row.measure.startswith("python benchmarks/")
    options = re.findall(r"--[a-z-]+", row.measure)
    text = script.read_text()
    assert all(f'"{option}"' in text for option in options)
    assert all(f'"{part}":' in text for part in row.measure.split()[2:] if script.stem == "tuning")


def test_the_c_code_reads_them():
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"exec(open({tuning.__file__!r}).read()); print(definitions())",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"WORK_PER_THREAD = {tuning.WORK_PER_THREAD.value}," in done.stdout
    sources = "".join(path.read_text() for path in (ROOT / "nc/kernels/c_code").glob("*.c"))
    for name in re.findall(r"(\w+) = ", tuning.definitions()):
        assert re.search(rf"\b{name}\b", sources)
        assert f"#define {name} " not in sources


@pytest.mark.parametrize(
    ("text", "expected"), [("2048K\n", 2**21), ("1M\n", 2**20), ("512", 512), (None, 2**20)]
)
def test_the_second_cache(text, expected, tmp_path, monkeypatch):
    if text is not None:
        of_cache(tmp_path, 2, text)
    monkeypatch.setattr(caches, "_FOLDER", tmp_path)
    assert caches.second.__wrapped__() == expected


def test_the_last_cache_is_the_largest(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "_FOLDER", tmp_path)
    assert caches.last.__wrapped__() == 2**25  # where the system does not tell
    for index, text in ((0, "32K\n"), (2, "512K\n"), (3, "16M\n")):
        of_cache(tmp_path, index, text)
    assert caches.last.__wrapped__() == 2**24


def of_cache(folder, index, text):
    (folder / f"index{index}").mkdir()
    (folder / f"index{index}" / "size").write_text(text)
