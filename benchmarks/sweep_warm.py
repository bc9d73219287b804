"""Imported once, before the processes of single architectures are forked.

What the first quantization imports is there for all of them.
"""

from __future__ import annotations

import torch
from sweep_models import Entry, entries
from sweep_one import run

entries()
with torch.no_grad():
    run(Entry("transformers", "bert", "BertModel"), "native")
