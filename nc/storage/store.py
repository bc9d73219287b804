"""QDQ graph ↔ a directory of safetensors, JSON and checksums: written atomically, checked before it is built.

`nc.storage.layout` describes the files. Checksums find accidents, not attackers, who can write new checksums.
Untrusted files are safe because of what is never done with them, see `nc.storage.graph_json`,
`nc.storage.allowlist` and `nc.storage.pytree_json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from nc.graph.plan import Plan
from nc.graph.qdq import QDQGraph
from nc.storage import folder, graph_json
from nc.storage.folder import MODEL, malformed

FORMAT = "nc-model"
SCHEMA = folder.FORMATS[FORMAT]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredGraph:
    """A graph's artefact with complete, unaltered files and listed operators only.

    Nothing of it is built yet.

    Attributes:
        content: the files, their document in the form of the newest schema.
    """

    content: folder.FolderContent

    @property
    def directory(self) -> Path:
        """The folder of the artefact."""
        return self.content.directory

    @property
    def document(self) -> dict[str, Any]:
        """The content of model.json."""
        return self.content.document

    @property
    def plan(self) -> Plan:
        """The plan, without building the graph; raises ArtefactCorruptError like `graph`."""
        with malformed(self.directory / MODEL):
            return Plan.from_dict(self.document["plan"])

    def graph(self, *, wait: bool = True) -> QDQGraph:
        """Build the graph.

        Args:
            wait: until the weights are checked. False: see `folder.read`.

        Raises:
            ArtefactCorruptError: the weights are altered, or agree with their checksum but are not what
                `write` writes.
            ArtefactOperatorError: this version of torch lacks an operator.
        """
        with contextlib.nullcontext() if not wait else self.content.checked():
            tensors = self.content.tensors(_stays_in_file)
            with malformed(self.directory / MODEL):
                graph = graph_json.decode(self.document, tensors)
        return dataclasses.replace(graph, intact=self.content.weights.identity.check)


def _stays_in_file(name: str, tensor: torch.Tensor) -> bool:
    """Codes of weights, which engines copy anyway when they pack them."""
    return name.startswith("constant.") and tensor.dtype in (torch.int8, torch.uint8)


def write(graph: QDQGraph, backend: str, directory: str | os.PathLike[str], card: str = "") -> None:
    """Write a graph as an artefact; the same graph gives the same bytes.

    Args:
        graph: the quantized model.
        backend: name of the backend that it ran on, as information.
        directory: created with its parents; an artefact that is there is replaced as a whole.
        card: the text of README.md; "": no such file.

    Raises:
        ArtefactError: something else is there, or the graph holds something that an artefact can't; the
            message names it.
        ArtefactOperatorError: an operator is not on the allow-list.
    """
    target = folder.replaceable(directory)
    document, tensors = graph_json.encode(graph)
    versions = folder.versions(transformers='"transformers.' in json.dumps(document["signature"]))
    folder.write(
        target,
        {"format": FORMAT, "schema": SCHEMA, "versions": versions, "backend": backend, **document},
        tensors,
        card,
    )


def read(directory: str | os.PathLike[str]) -> StoredGraph:
    """Read and check an artefact.

    Raises:
        ArtefactMissingError: the directory or a file of it is not there.
        ArtefactCorruptError: a file is truncated or altered.
        ArtefactSchemaError: a newer version wrote it, or it is not an artefact of a graph.
        ArtefactOperatorError: its graph holds an operator that is not on the allow-list.
    """
    return checked(folder.read(directory, (FORMAT,)))


def checked(content: folder.FolderContent) -> StoredGraph:
    """Files that were read, with the checks of a graph; raises as `read`."""
    with malformed(content.directory / MODEL):
        graph_json.check_operators(content.document)
    return StoredGraph(content)
