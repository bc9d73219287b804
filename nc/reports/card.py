"""Write the card of a quantized model: what it is, what was measured where, and how to load it.

The head is YAML as model hubs read it.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch

from nc._version import __version__
from nc.kernels import cpu
from nc.reports.report import Report
from nc.reports.weight_report import WeightReport

_TAGS = ("quantized", "post-training-quantization", "cpu", "x86-64", "pytorch")


def model_card(report: Report | WeightReport, directory: str | os.PathLike[str]) -> str:
    """Return the card as Markdown.

    Args:
        report: of the model.
        directory: that the model is saved to; its name is that of the model.
    """
    name = Path(directory).resolve().name
    low_bit = isinstance(report, WeightReport)
    kind = ["low-bit"] if isinstance(report, WeightReport) else ["int8"] * bool(report.ran_int8)
    tags = "\n".join(f"- {tag}" for tag in (*_TAGS, *kind))
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    call = "q_model = nc.load({!r})  # model=YourModel() for classes that are not of transformers"
    return f"""---
library_name: nc
tags:
{tags}
---

# {name}

{report.model or "A model"}, quantized after training by nc {__version__}, for x86-64 CPUs.

## Load

```python
import nc  # the distribution is nc-quant

{call.format(name) if low_bit else f"q_model = nc.load({name!r})"}
```

The folder contains no code, and nothing of it is unpickled.

## What was measured

On {cpu.model_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {day}:

```text
{report}
```

Other CPUs have other times, and a few other roundings. `print(q_model.report())` says what runs on yours.

## What you should add

* the model that this one was made from, and its licence
* the data that it was calibrated with
* the accuracy on your task, in fp32 and quantized
"""
