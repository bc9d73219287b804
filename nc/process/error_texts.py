"""Meanings of errors of torch and ONNX Runtime that have no specific class.

All texts of other libraries that nc looks at are here.
"""

from __future__ import annotations

import re

#: Lines of torch's ONNX exporter that name what failed.
_OF_ONNX_EXPORT = re.compile(r"No ONNX function|not supported|[Ee]rror when|No decomp")


def is_of_unknown_output(error: BaseException) -> bool:
    """Return whether pytree, or `nc.graph.caches`, met an output that holds other values than tensors."""
    return "not a known type" in str(error)


def is_of_data_dependence(error: BaseException) -> bool:
    """Return whether torch.export met a value that depends on data.

    For a slice, torch 2.8 says only that its bound is a FakeTensor.
    """
    text = str(error)
    return (
        "DataDependent" in type(error).__name__
        or "data-dependent" in text
        or "found type 'FakeTensor'" in text
    )


def is_of_index(error: BaseException) -> bool:
    """Return whether an index is out of its range, in the words of torch or IPEX.

    TorchScript raises its own error type.
    """
    return isinstance(error, IndexError) or any(
        words in str(error) for words in ("index out of range", "out of DATA bounds")
    )


def is_of_gradients(error: BaseException) -> bool:
    """Return whether autograd can't follow what a module does."""
    return re.search("grad|in-?place", str(error)) is not None


def is_of_tensor_used_twice(error: BaseException) -> bool:
    """Tell whether ONNX Runtime 1.32 fails because a weight is used twice.

    It does so where kernels that can't saturate are asked for.
    """
    return "Attempt to replace the existing tensor" in str(error)


def is_of_grouped_experts(error: BaseException) -> bool:
    """Tell whether an exporter has no translation for transformers' product of stacked experts."""
    return "grouped_mm" in str(error)


def lines_of_onnx_export(error: BaseException) -> list[str]:
    """Return the lines of an error of torch's ONNX exporter that name what failed."""
    return [line.strip() for line in str(error).splitlines() if _OF_ONNX_EXPORT.search(line)]
