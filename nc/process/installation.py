"""Check that the module `nc` is the one of the distribution nc-quant.

Another project is called `nc` on PyPI. It installs a module `nc` too, so each overwrites files of the other,
and uninstalling one takes files of the other with it. This module needs the standard library and `nc.errors`
only: it works where `nc/__init__.py` is not ours.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys

from nc.errors import NCError
from nc.process.warn import warn

DISTRIBUTION = "nc-quant"
_ADVICE = f"Run `pip uninstall nc {DISTRIBUTION}`, then install {DISTRIBUTION} again."


def why_not_ours() -> str:
    """Return what to do when `nc/__init__.py` is missing or another project's.

    It is "" when the imported package is ours.
    """
    package = sys.modules["nc"]
    if (
        vars(package).get("NCError") is NCError
    ):  # getattr would ask the other project's object, which answers to many names
        return ""
    path = getattr(package, "__file__", None)
    found = (
        f"{path} is not part of {DISTRIBUTION}" if path else f"nc/__init__.py of {DISTRIBUTION} is missing"
    )
    return f"{found}: another project called nc has overwritten or removed it. {_ADVICE}"


def other_distribution() -> str:
    """Which other distribution installed a module `nc`, and what to do; "" when there is none."""
    for found in importlib.metadata.distributions(name="nc"):
        if not found.read_text("METADATA") and not found.read_text("PKG-INFO"):
            continue  # what an interrupted uninstallation left
        summary = found.metadata.get_all("Summary", ["without a summary"])[0]
        return (
            f"nc {found.version} ({summary}) is another project that installs a module called nc, over this "
            f"one's files. {_ADVICE}"
        )
    return ""


def altered_files() -> str:
    """Which of the installed files are missing or not as they were installed, and what to do.

    It is "" for an editable or no installation.
    """
    try:
        installed = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    altered = [
        str(path)
        for path in installed
        if path.parts[0] == "nc" and path.hash is not None and _digest(path) != path.hash.value
    ]
    if not altered:
        return ""
    return (
        f"Files that are missing or not as {DISTRIBUTION} installed them: {len(altered)}, e.g. {altered[0]}. "
        f"{_ADVICE}"
    )


def _digest(path: importlib.metadata.PackagePath) -> str:
    """SHA-256 of an installed file as RECORD writes it; "" when it is missing."""
    try:
        digest = hashlib.sha256(path.read_binary()).digest()
    except FileNotFoundError:
        return ""
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def warn_of_others() -> None:
    """Warn at the line that imports `nc`, when another distribution has a module of that name."""
    why = other_distribution()
    if why:
        warn(why)
