"""Where the files of packages lie from which benchmarks take weights and data. No package is imported.

Packages of npm are looked for in the folders of the environment variable NODE_PATH, in `node_modules` of the
current folder, and in `share/node_modules` of the Python environment, where `make bench-tasks` unpacks them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def installed(package: str) -> Path | None:
    """Return the folder of a Python package; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    places = (spec and spec.submodule_search_locations) or ()
    return Path(next(iter(places))) if places else None


def folder(package: str, *pinned: str) -> Path:
    """Return the folder of an installed Python package.

    Args:
        package: as it is imported.
        pinned: what pip has to install, with versions.

    Raises:
        LookupError: it is not installed; says how to.
    """
    found = installed(package)
    if found is None:
        raise LookupError(missing(package, *pinned))
    return found


def missing(package: str, *pinned: str) -> str:
    """Return that a package is missing, and how to install it."""
    return f"{package} is missing: pip install --no-deps {' '.join(pinned)}"


def npm(package: str, version: str) -> Path:
    """Return the folder of a package of npm.

    Raises:
        LookupError: it is not there; says how to unpack it.
    """
    places = [Path(place) for place in os.environ.get("NODE_PATH", "").split(os.pathsep) if place]
    places += [Path("node_modules"), Path(sys.prefix) / "share" / "node_modules"]
    for place in places:
        if (place / package / "package.json").is_file():
            return place / package
    file = f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"
    target = f"node_modules/{package}"
    msg = (
        f"{package} is missing: npm pack {package}@{version} && mkdir -p {target} && "
        f"tar -xzf {file} --strip-components=1 -C {target}"
    )
    raise LookupError(msg)
