"""What the files of an artefact hold, by name.

Documents show these tables, and tests compare them with what is written.
"""

from __future__ import annotations

#: Each file.
FILES = {
    "model.json": "what the model is, without the values of its tensors",
    "weights.safetensors": "every tensor",
    "checksums.json": "SHA-256 and size of the other two",
}
_COMMON = {
    "format": "which of the two kinds of artefacts it is",
    "schema": (
        "number of this description; a version of nc reads every number up to its own, and refuses a newer "
        "one"
    ),
    "versions": "versions of nc, torch and other packages that wrote it; information only",
}
#: Keys of model.json of a captured model.
GRAPH_KEYS = {
    **_COMMON,
    "backend": "name of the backend that it was converted for; information only",
    "signature": "parameters of `forward`, structure of inputs and outputs, and the flat inputs",
    "plan": "how each operator is quantized, by which rule and why; `isa` lists the CPU features needed",
    "notes": "operator → what was changed there, for the report",
    "nodes": "the graph in execution order: name, operator, arguments, dtype and shape of each node",
    "sizes": "free size → its value at capture; null where it depends on data",
    "memory_order": "tensor → order of its dimensions in memory, where that is not row-major",
    "float_bytes": "bytes of the fp32 model's constants",
    "sqnr_vs_fp32_db": "quantized graph against fp32 on the example inputs, in dB",
    "accuracy": "the same on calibration data, for the report; null where none was kept, and may be absent",
    "algorithms": "what each algorithm did",
    "changes": "what `load` changed for a CPU, before the model was saved again",
    "health": "problems that calibration found",
    "evidence": "configuration, errors along the depth, ranges and channels, for the report; may be absent",
}
#: Names of tensors of a captured model.
GRAPH_TENSORS = {
    "constant.NAME": "a constant of the graph: weights, codes, scales, zero points",
    "example.INDEX": "an example input; `load` verifies the engine with them",
    "expected.INDEX": (
        "the output for them, unless the outputs take more than 1 MB and more than a quarter of the constants"
    ),
}
#: Keys of model.json of a model with low-bit weights.
WEIGHT_KEYS = {
    **_COMMON,
    "class": "the class of the model; information only",
    "transformers": (
        "class, configuration, generation configuration and attention of a model of transformers; null for "
        "others"
    ),
    "record": "plan, algorithms and configuration, as the report shows them",
    "layers": (
        "for each layer with a low-bit weight: kind, shape [N, K], number format, dtypes of activations and "
        "results, and its result"
    ),
    "tensors": "name of each parameter and buffer → name of its tensor in weights.safetensors",
}
#: Names of tensors of a low-bit weight, appended to the name of its layer.
WEIGHT_TENSORS = {
    "codes": "unsigned codes, a stream of bits in each row, the lowest bits first",
    "scale": "one for each group; E8M0 is stored as uint8",
    "zero": "zero points of asymmetric integers",
    "minimum": "minima, where the format has them in place of zero points",
    "outer_scale": "scales of the scales, with `double_quant`",
    "outer_minimum": "scales of the minima, with `double_quant`",
}
#: By what nc knows files and folders that an earlier call wrote, and that the next one therefore replaces.
KNOWN = {
    "an artefact": (
        "`format` in model.json, and no other file beside the three but the card of `save(card=True)` as it "
        "was written"
    ),
    "a folder of nc.hf": "nc_checksums.json, which lists all files; with one more the folder stays",
    "a page": "a tag `generator` in its head",
    "a report, a front, a configuration, statistics": "`format` or `algorithm`, and the schema",
    "a program, a file of weights": 'the words "written by nc" in a comment or in the metadata',
    "the file of `autoquant(cache=)`": "`choices`; a damaged one stays, and nothing is kept",
    "a trial of `tune(trials=)`": "its key; a damaged one is kept as `….damaged`",
}
