"""Files that AutoRound writes in the layouts of other tools, with its own settings.

Only some of its GPTQ layouts store zero points minus 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nc.errors import UnsupportedError
from nc.interchange.layer import check_settings

#: `packing_format` → the format, and its version.
_LAYOUTS = {
    "auto_round:auto_gptq": ("gptq", {"checkpoint_format": "gptq"}),
    "auto_gptq": ("gptq", {"checkpoint_format": "gptq"}),
    "auto_round": ("gptq", {"checkpoint_format": "gptq_v2"}),
    "auto_round:gptqmodel": ("gptq", {"checkpoint_format": "gptq_v2"}),
    "auto_round:auto_awq": ("awq", {"version": "gemm"}),
    "auto_awq": ("awq", {"version": "gemm"}),
}
#: Settings that are the same for the format's reader.
_SHARED = ("bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "version", "zero_point")
#: Settings that are read here, or say how the codes were found. `extra_config` has other bits and groups of
#: single layers, which their tensors have too.
_KNOWN = """
    quant_method packing_format backend autoround_version data_type iters nsamples seqlen lr minmax_lr
    batch_size
    low_gpu_mem_usage low_cpu_mem_usage enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning
    gradient_accumulate_steps amp scale_dtype to_quant_block_names block_name_to_quantize extra_config
    quant_lm_head act_bits act_dynamic act_sym act_group_size act_data_type
    dataset enable_alg_ext lm_head dynamic
    pack_dtype true_sequential static_groups damp_percent modules_to_not_convert
"""


def settings(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the format of a file, and what its reader is told.

    Raises:
        UnsupportedError: another layout, codes that are not integers, or quantized activations.
    """
    check_settings(config, (*_KNOWN.split(), *_SHARED), "quantization_config")
    backend = config.get("backend") if config.get("backend") != "auto" else None
    layout = config.get("packing_format") or backend or "auto_round:auto_gptq"
    rounded = int(config.get("act_bits") or 16) < 16
    if layout not in _LAYOUTS or rounded or (config.get("data_type") or "int") != "int":
        kept = {
            key: config[key]
            for key in ("packing_format", "backend", "data_type", "act_bits")
            if key in config
        }
        msg = (
            f"AutoRound's files with {kept} are not read; nc reads integer weights in "
            f"{', '.join(_LAYOUTS)}, and float activations."
        )
        raise UnsupportedError(msg)
    name, version = _LAYOUTS[layout]
    return name, {**{key: config[key] for key in _SHARED if config.get(key) is not None}, **version}
