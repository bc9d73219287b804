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
    sums = {name: (folder / name).read_bytes() for name in FILES[1:]}
    sums = {name: {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)} for name, raw in sums.items()}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=2, sort_keys=True) + "\n")
