"""Change exported folders, load and call them: each gives outputs or a typed error, and no process ends.

    python test/runner/fuzz.py FOLDER_WITH_NC_RUN EXPORTED COUNT [SEED]

Numbers, names, lists and bytes of plan.json, and bytes of data.bin, change; checksums become those of the
changed files, so that what is behind them is reached.
"""

import collections
import copy
import faulthandler
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, sys.argv[1])

import nc_run

NUMBERS = [
    0,
    1,
    2,
    3,
    15,
    16,
    17,
    63,
    64,
    65,
    4096,
    2**31 - 1,
    2**31,
    2**39,
    2**40,
    2**63 - 1,
    2**63,
    -1,
    -2,
    -(2**31),
]
OTHERS = [
    None,
    True,
    1.5,
    "",
    "a",
    [],
    {},
    [0, 1, 0],
    [0, 0, 1],
    [1, 2, 3],
    "0x1p+0",
    "nan",
    "-inf",
    "0x1p+5000",
]
LIMIT = 1 << 26
#: What users of the package can get.
TYPED = (nc_run.errors.RunnerError, IndexError)


def leaves(value, path=()):
    """Return the paths of all values inside of others."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in pairs for found in leaves(each, (*path, key)))]


def changed(document):
    """Return a document with one to three values changed, taken away, or put twice."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        *path, key = random.choice(leaves(document)[1:])
        parent = document
        for each in path:
            parent = parent[each]
        old = parent[key]
        near = [old + random.choice((-64, -16, -4, -1, 1, 4, 16, 64))] if type(old) is int else []
        new = random.choice(
            [*near * 12, *NUMBERS, *OTHERS] if random.random() < 0.9 else [copy.deepcopy(old)]
        )
        if random.random() < 0.05:
            del parent[key]
        elif isinstance(parent, list) and random.random() < 0.1:
            parent.insert(key, copy.deepcopy(old))
        else:
            parent[key] = copy.deepcopy(new)
    return document


def flipped(content):
    """Return bytes of which some are others, or the last ones are missing."""
    content = bytearray(content)
    if random.random() < 0.2:
        return bytes(content[: random.randrange(len(content))])
    for _ in range(random.choice((1, 1, 2, 8))):
        content[random.randrange(len(content))] = random.randrange(256)
    return bytes(content)


def attempt(folder, inputs):
    """Load a folder and call it; return what came of it."""
    try:
        model = nc_run.load(folder, threads=2, check=random.random() < 0.7, most_bytes=LIMIT)
    except TYPED as error:
        return type(error).__name__
    try:
        for given in inputs:
            model(*given)
    except TYPED as error:
        return f"loaded, {type(error).__name__}"
    return "outputs"


def main():
    faulthandler.enable()
    exported, count = Path(sys.argv[2]), int(sys.argv[3])
    random.seed(sys.argv[4] if len(sys.argv) > 4 else 0)
    files = {path.name: path.read_bytes() for path in exported.iterdir()}
    document = json.loads(files["plan.json"])
    model = nc_run.load(exported)
    probes = [tuple(model._stored(each).copy() for each in probe.inputs) for probe in model._document.probes]
    inputs = [*probes, *(tuple(np.repeat(x, 3, 0) for x in each) for each in probes if document["texts"])]
    found = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(count):
            folder = Path(temporary, str(number))
            folder.mkdir()
            now = dict(files)
            which = random.random()
            if which < 0.75:
                now["plan.json"] = json.dumps(changed(document)).encode()
            else:
                name = random.choice(("plan.json", "data.bin"))
                now[name] = flipped(now[name])
            if random.random() < 0.95:
                sums = {name: hashlib.sha256(now[name]).hexdigest() for name in ("plan.json", "data.bin")}
                now["checksums.json"] = json.dumps({"format": "nc-run", "sha256": sums}).encode()
            elif random.random() < 0.5:
                now["checksums.json"] = flipped(now["checksums.json"])
            else:
                del now[random.choice(list(now))]
            for name, content in now.items():
                (folder / name).write_bytes(content)
            print(number, end=" ", file=sys.stderr, flush=True)
            found[attempt(folder, inputs)] += 1
            shutil.rmtree(folder)
    print(dict(found))


if __name__ == "__main__":
    main()
