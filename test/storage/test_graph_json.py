"""Graphs as JSON: what a file notes of nodes is checked."""

import pytest

from nc.storage import graph_json


@pytest.mark.parametrize("size", [{"dtype": "bfloat16"}, True, 0.5, None, []])
def test_sizes_that_are_none_are_refused(size):
    assert graph_json._decode_value({"dtype": "float32", "shape": [2, 3]}, {}).shape == (2, 3)
    with pytest.raises(TypeError, match="expected the sizes of a tensor"):
        graph_json._decode_value({"dtype": "float32", "shape": [2, size]}, {})
