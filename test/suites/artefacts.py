"""Artefacts, and their documents changed with correct checksums."""

import hashlib
import json

FILES = ("checksums.json", "model.json", "weights.safetensors")


def forge(folder, change=None, **files):
    """Change model.json or other files and make their checksums again, as an attacker would."""
    document = json.loads((folder / "model.json").read_text())
    if change:
        change(document)
    for name, raw in {"model_json": json.dumps(document).encode(), **files}.items():
        (folder / name.replace("_", ".", 1)).write_bytes(raw)
    sign(folder)


def sign(folder, document=None):
    """Write checksums that fit, after model.json if a document is given."""
    if document is not None:
        (folder / "model.json").write_text(json.dumps(document))
    sums = {name: (folder / name).read_bytes() for name in FILES[1:]}
    sums = {name: {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)} for name, raw in sums.items()}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n")


def places(value, path=()):
    """Every place of a document: (container, key, path)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [
        place for key, child in items for place in ((value, key, (*path, key)), *places(child, (*path, key)))
    ]
