"""The checker of phrases finds them where people read them, and nowhere else."""

import importlib
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"
sys.path.insert(0, str(CI))
words = importlib.import_module("words")
sys.path.remove(str(CI))


@pytest.mark.parametrize(
    "text",
    [
        "it is no number",
        "the codes lie in memory",
        "what stands in front of it",
        "one behind the other",
        "a thread of its own",
        "those that there are",
    ],
)
def test_phrases_are_found(text):
    assert list(words.findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "it is not a number",
        "there is no number",
        "it is no longer used",
        "M stands for rows",
        "`behind`",
        "behind: b",
    ],
)
def test_plain_english_is_not(text):
    assert list(words.findings(text)) == []


def test_what_is_read_of_a_file(tmp_path):
    source = tmp_path / "a.py"
    source.write_text(
        '"""It is no one\'s."""\n# it lies here\nmessage = "it is no number"\n\n\ndef f():\n    """It stands."""\n'
    )
    assert words.main([str(source)]) == 3
    page = tmp_path / "a.md"
    page.write_text("It stands there.\n\n```\nbehind\n```\n")
    assert words.main([str(page)]) == 1
