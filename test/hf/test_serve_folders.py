"""What `nc serve` says of folders that it can't serve."""

import json

import pytest

from nc.errors import InputError

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "config", [None, "{", "[" * 200, "[]", "{}", json.dumps({"quantization_config": {"quant_method": "awq"}})]
)
def test_folders_without_low_bit_weights(config, tmp_path):
    from nc.hf.serve import check_servable

    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match="no language model with low-bit weights"):
        check_servable(tmp_path, "127.0.0.1", 8000)


def test_folders_without_a_tokenizer(tmp_path):
    from nc.hf.serve import check_servable

    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "nc"}}))
    with pytest.raises(InputError, match="no tokenizer"):
        check_servable(tmp_path, "127.0.0.1", 8000)
