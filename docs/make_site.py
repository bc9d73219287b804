"""Build the site from the pages of the repository: `python docs/make_site.py OUT [--no-outputs]`.

The pages stay as they are read in the repository. This copies them, and the files that they link to, to a
folder for Sphinx, makes README.md the first page, and adds the menu. OUT/VERSION/ is the site of this
version, OUT/index.html lists all versions in OUT. A warning of Sphinx is an error. With --no-outputs the
tutorials are not run, which takes seconds instead of minutes.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
VERSION: str = runpy.run_path(str(ROOT / "nc" / "_version.py"))["__version__"]

#: Caption in the menu → pages in their order, without ".md"; a star stands for the others of a folder.
MENU = {
    "Start": ("docs/start/install", "docs/start/quickstart-int8", "docs/start/quickstart-4-bit"),
    "Tutorials": ("docs/tutorials/encoder", "docs/tutorials/cnn", "docs/tutorials/language-model"),
    "How to": ("docs/how-to/quantize-*", "docs/how-to/*", "examples/README", "examples/serve/README"),
    "Concepts": ("docs/concepts/the-way-of-a-model", "docs/concepts/*"),
    "Reference": ("docs/reference/README", "docs/reference/functions", "docs/reference/*"),
    "Results": ("docs/results/README", "docs/results/*"),
    "Contribute": ("CONTRIBUTING", "docs/contribute/*", "CODE_OF_CONDUCT", "SECURITY", "CHANGELOG"),
}
#: What the tutorials import: the models and the texts of the examples, and pictures of the benchmarks.
HELPERS = ("examples/minilm.py", "examples/smollm2.py", "benchmarks/pictures.py", "benchmarks/packages.py")
#: Options of Sphinx for pages whose tutorials are not run, and therefore have no language for their programs.
NO_OUTPUTS = ("-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst.header,myst-nb.lexer")
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def main() -> None:
    """Build the site of this version."""
    out = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "built")
        lay_out(source)
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", str(DOCS)]
        command += NO_OUTPUTS if "--no-outputs" in sys.argv[2:] else ()
        subprocess.run([*command, "-d", f"{folder}/doctrees", str(source), str(built)], check=True)
        shutil.rmtree(out / VERSION, ignore_errors=True)
        shutil.copytree(built, out / VERSION)
    versions = sorted((path.name for path in out.iterdir() if path.is_dir()), key=_order, reverse=True)
    (out / "index.html").write_text(listing(versions), encoding="utf-8")
    print(f"{out / VERSION / 'index.html'}: {len(pages(ROOT))} pages")


def pages(root: Path) -> list[Path]:
    """Return the Markdown files of the site, below a root."""
    found = [*root.glob("*.md"), *root.glob("docs/*/*.md"), *root.glob("examples/**/*.md")]
    return sorted(path for path in found if path.relative_to(root).parts[0] != "results")


def lay_out(source: Path) -> None:
    """Copy pages, what they link to, and what tutorials import; write the first page with the menu."""
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        _write(source / page.relative_to(ROOT), _without_first_page(text, page))
        for target, _ in _LINK.findall(text):
            path = (page.parent / target).resolve()
            if path.is_file() and path.suffix != ".md" and ROOT in path.parents:
                _copy(path, source / path.relative_to(ROOT))
    for name in HELPERS:
        _copy(ROOT / name, source / "docs" / "tutorials" / Path(name).name)
    readme = source / "README.md"
    readme.rename(source / "index.md")
    with (source / "index.md").open("a", encoding="utf-8") as file:
        file.write(menu())


def menu() -> str:
    """Return the table of contents of the site, as MyST writes it."""
    parts = []
    for caption, names in MENU.items():
        head = ["```{toctree}", ":hidden:", ":glob:", ":maxdepth: 1", f":caption: {caption}", ""]
        parts.append("\n".join([*head, *names, "```"]))
    return "\n\n" + "\n\n".join(parts) + "\n"


def listing(versions: list[str]) -> str:
    """Return the page that lists the versions, the newest one first."""
    items = "".join(f'<li><a href="{name}/index.html">nc {name}</a></li>' for name in versions)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>nc: versions</title>'
        '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}'
        "body{font:1rem system-ui;max-width:40rem;margin:3rem auto;padding:0 1rem}</style>"
        f"<h1>Documentation of nc</h1><ul>{items}</ul></html>\n"
    )


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _without_first_page(text: str, page: Path) -> str:
    """Return a page's text with links to README.md in the root as links to the first page."""

    def link(match: re.Match[str]) -> str:
        is_first = (page.parent / match[1]).resolve() == ROOT / "README.md"
        return match[0].replace("README.md", "index.md") if is_first else match[0]

    return _LINK.sub(link, text)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
