"""Find phrases that are English words in another language's order; see docs/contribute/style.md.

    python3 .ci/words.py [PATH ...]

It reads strings with a space (docstrings, messages) and comments of Python files, and pages. Code in
backticks, program text of pages and generated pages are left out. Exit code 1: there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Phrase → what to write.
PHRASES = {
    r"(?<!there )(?<!There )\b(is|are|was|were) no (?!longer\b|more\b|one\b|matter\b)": "is not a …",
    r"\bwhat there (is|are|was|were)\b|\bthose (that|which) there (are|were)\b": "what exists",
    r"\b(stands|stood)\b(?! for\b)|\b(?<!to )stand\b(?! for\b|-|s? alone)": "is",
    r"\b(lies|lay|lie)\b": "is",
    r"\bin front of\b": "before",
    r"\bbehind\b(?!:)": "after",
    r"\bone (behind|after) the other\b": "consecutively",
    r"\bof (ours|theirs|yours|its own|their own)\b": "our …, its own …",
    r"\bfor ever\b": "forever, always",
}
_CODE = re.compile(r"`[^`]*`")
_LEFT_OUT = {"CHANGELOG.md", "words.py", "style.md"}
#: Folders of pages that are made of docstrings and results.
_GENERATED = {"reference", "results"}


def findings(text: str) -> Iterator[tuple[str, str]]:
    """Yield each phrase that a text has, and what to write."""
    text = _CODE.sub("``", text)
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern, text):
            yield match[0].strip(), instead


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines of a file that people read, with their numbers."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        inside = False
        for number, line in enumerate(source.splitlines(), 1):
            inside ^= line.lstrip().startswith("```")
            if not inside:
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for i, line in enumerate(node.value.splitlines()):
                yield node.lineno + i, line


def main(paths: list[str]) -> int:
    """Print findings; returns their number."""
    folders = [Path(path) for path in paths] or [
        ROOT / name for name in ("nc", "docs", "examples", "README.md")
    ]
    files = [
        file
        for folder in folders
        for file in ([folder] if folder.is_file() else sorted((*folder.rglob("*.py"), *folder.rglob("*.md"))))
    ]
    count = 0
    for file in files:
        if file.name in _LEFT_OUT or file.parent.name in _GENERATED:
            continue
        for number, text in sorted(set(texts_of(file))):
            for phrase, instead in findings(text):
                count += 1
                print(f"{file}:{number}: {phrase!r}: write {instead}")
    return count


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
