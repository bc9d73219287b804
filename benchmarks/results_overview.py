"""The overview: one line per CPU says how fast nc is, and a few lines say what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import results_architectures as architectures
from results_markdown import geometric_mean, grouped, markdown, matches, text
from results_rows import Row

Rows = Mapping[str, Sequence[Row]]
#: Instruction set → its name, the first that a CPU has counts.
KINDS = {"amx_int8": "AMX", "avx512_vnni": "AVX-512 VNNI", "avx2": "AVX2"}
CONDITIONS = (("batch 1, 2 threads", 1, 2), ("batch 1, 1 thread", 1, 1), ("batch 16, 2 threads", 16, 2))


def kind(row: Row) -> str:
    """Return the words for a CPU: its instruction set, and its name."""
    name = next((said for flag, said in KINDS.items() if flag in row.isa.split()), row.isa)
    return f"{name} ({row.machine.split(',')[0]})"


def speed(rows: Rows) -> str:
    """Return the speed relative to OpenVINO on each CPU: geometric mean over the models, and the slowest."""
    body = []
    for same in grouped(rows["speed"], kind):
        cells = []
        for _, batch, threads in CONDITIONS:
            where = {
                "base": "openvino-int8",
                "engine": "nc-native",
                "batch": batch,
                "threads": threads,
                "further": None,
                "graph": None,
            }
            last = {row.what["model"]: row for row in same if matches(row, where)}
            found = [float(value) for row in last.values() if (value := row.value("speed")) is not None]
            cells.append(f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else "–")
        if any(cell != "–" for cell in cells):
            body.append([kind(same[0]), *cells])
    return markdown(["CPU", *(words for words, _, _ in CONDITIONS)], body, numbers=3)


def tokens(rows: Rows) -> str:
    """Return how many times as fast as llama.cpp a token is on each CPU."""
    body = []
    for same in grouped(rows["low-bit-speed"], kind):
        where = {"measured": "tokens", "engine": "nc-plan", "further": None}
        last = [row for row in same if matches(row, where)][-1:]
        body += [
            [kind(row), *(text(row.value(name) or "–", 2) for name in ("prefill speed", "decode speed"))]
            for row in last
        ]
    return markdown(["CPU", "prompt, × llama.cpp", "each token, × llama.cpp"], body, numbers=2)


def costs(rows: Rows) -> str:
    """Return the price of int8: preparation, start, accuracy, and which models go through."""
    prepared = _last(rows["preparation"], measured="prepare and convert", model="bert-base")
    starts = [
        float(row.figures["load and first call"].value)
        for row in _each(rows["serving"], measured="cold start", model="bert-base")
    ]
    dynamic = _last(rows["accuracy"], measured="accuracy", task="minilm", flow="nc dynamic per_token")
    there = [
        row for row in rows["accuracy"] if row.machine == dynamic.machine
    ]  # flows are compared on one machine
    flows = {said: _last(there, measured="accuracy", task="minilm", flow=name) for name, said in BEST.items()}
    cosines = ", ".join(f"{row.value('mean cosine')} ({said})" for said, row in flows.items())
    went, failed = (
        len(architectures.with_status(rows["architectures"], status)) for status in ("went through", "failed")
    )
    return "\n".join(
        [
            f"* Quantizing BERT-base takes {prepared.value('together')} s, and as extra memory "
            f"{prepared.value('relative memory')} times the bytes of its fp32 weights ({prepared.machine}): "
            "[preparation](preparation.md).",
            f"* Loading a saved BERT-base and its first answer take {min(starts)} to {max(starts)} s: "
            "[serving](serving.md).",
            f"* Embeddings of MiniLM keep a mean cosine to fp32 of {cosines}: [accuracy](accuracy.md).",
            f"* {went} of {went + failed} architectures of torchvision, timm and transformers go through: "
            "[architectures](architectures.md).",
        ]
    )


#: Flows of the overview, and what they are called there.
BEST = {
    "nc static minmax": "static ranges",
    "nc auto": '"auto"',
    "nc dynamic per_token": "dynamic, matmuls in fp32",
}


def _each(rows: Sequence[Row], **where: str) -> list[Row]:
    """Return the last matching row of each machine."""
    return list({row.machine: row for row in rows if matches(row, where)}.values())


def _last(rows: Sequence[Row], **where: str) -> Row:
    return [row for row in rows if matches(row, where)][-1]


PARTS: dict[str, Callable[[Rows], str]] = {
    "overview-speed": speed,
    "overview-tokens": tokens,
    "overview-costs": costs,
}
