"""How the files of an export get to their place: all of them, or none."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nc.backends.base import EngineModel, Exporter
from nc.errors import ArtefactError, ConfigError
from nc.graph.qdq import QDQGraph
from nc.storage import marks
from nc.storage.atomic import check_first, check_no_directory, replaced, replaced_folder, resolved, writing


def export(
    exporter: Exporter,
    format: str,
    graph: QDQGraph,
    engine: EngineModel | None,
    path: Path,
    options: Mapping[str, object],
) -> object:
    """Write a file with its parents, and those that belong to it; none is replaced until all are written.

    Args:
        exporter: what writes them.
        format: its name, for messages.
        graph: the quantized model.
        engine: the engine model, if the exporter needs it.
        path: of the file that users name.
        options: of the exporter.

    Returns:
        What the exporter tells.

    Raises:
        ConfigError: the name does not have the suffix that it should, or the exporter does not take such
            options.
        ArtefactError: a directory has the name, or one of several files is a link.
        NCError: as the exporter.
    """
    _check_options(exporter, format, options)
    if exporter.suffix and path.suffix != exporter.suffix:
        msg = f"Expected a path that ends in {exporter.suffix!r}, but got {str(path)!r}."
        raise ConfigError(msg)
    if exporter.folder:
        ours = marks.of_format(exporter.folder, 1)
        with replaced_folder(path, lambda folder: folder.is_dir() and ours(folder / "plan.json")) as staged:
            staged.mkdir()
            return exporter.write(graph, engine, staged, **options)
    check_no_directory(resolved(path))
    check_first(resolved(path), marks.program)
    with writing(path), tempfile.TemporaryDirectory(prefix="nc-") as folder:
        told = exporter.write(graph, engine, Path(folder) / path.name, **options)
        parts = sorted(Path(folder).iterdir())
        marks.mark(Path(folder) / path.name)
        _put(parts, path)
    return told


def _check_options(exporter: Exporter, format: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in exporter.options:
            has = f"it has {', '.join(exporter.options)}" if exporter.options else "it has none"
            msg = f"The format {format!r} has no option {name!r}; {has}."
            raise ConfigError(msg)
        exporter.options[name].check(name, value)


def _put(parts: Sequence[Path], path: Path) -> None:
    """Copy the files of a program to where `path` is to be; they keep their names."""
    files = {path.with_name(part.name): part for part in parts}
    link = next((file for file in files if file.is_symlink()), None)
    if link is not None and len(files) > 1:
        suffixes = " and ".join(part.name.removeprefix(path.stem) for part in parts)
        msg = (
            f"{str(link)!r} is a link, and the files {suffixes} must stay side by side. Give the path that "
            "it leads to."
        )
        raise ArtefactError(msg)
    earlier = path.exists() and marks.program(path)  # what it names, beside it, is then ours too
    with contextlib.ExitStack() as stack:
        for file, part in files.items():
            ours = marks.program if file == path else lambda _: earlier
            shutil.copyfile(part, stack.enter_context(replaced(file, ours)))
