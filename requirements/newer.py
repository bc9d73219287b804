"""Print which releases on the package index are newer than those that are pinned.

requirements/newest.txt pins them; there is one line for each package.

    python requirements/newer.py [FILE]

It asks `pip index versions`, which knows the releases for this Python and platform. The exit code is 0
whatever it finds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

NEWEST = Path(__file__).with_name("newest.txt")


def pins_in(text: str) -> dict[str, Version]:
    """Return the versions that a requirements file pins for this Python, by package."""
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if "==" in line and not line.startswith("#")]
    return {
        r.name: Version(next(iter(r.specifier)).version)
        for r in found
        if r.marker is None or r.marker.evaluate()
    }


def released(name: str) -> list[Version]:
    """All releases of a package on the index; none if it does not answer."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = [
        line.partition(":")[2] for line in done.stdout.splitlines() if line.startswith("Available versions:")
    ]
    return [Version(version.strip()) for line in listed for version in line.split(",")]


def told(name: str, pinned: Version, versions: list[Version]) -> str:
    """One line about a package."""
    if not versions:
        return f"{name} {pinned}: the package index does not answer"
    newer = sorted({version for version in versions if Version(version.public) > pinned})
    return (
        f"{name} {pinned}: newer is {', '.join(map(str, newer))}"
        if newer
        else f"{name} {pinned} is the newest"
    )


def main() -> None:
    """Print the lines."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else NEWEST
    for name, pinned in pins_in(path.read_text(encoding="utf-8")).items():
        print(told(name, pinned, released(name)))


if __name__ == "__main__":
    main()
