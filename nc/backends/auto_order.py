"""Which engine `backend="auto"` tries first.

It is the faster one, by what was measured on this kind of CPU with this kind of model.

`RACES` is what was measured, in docs/results/speed.md. To change the order of engines, measure
(`benchmarks/run.py`) and change a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from nc.graph.catalogue import kind_of_node

#: Kinds of CPU: the name in messages, and the feature that tells it; a CPU is of the first kind whose feature
#: it has.
CPUS = {
    "AMX": "amx_int8",
    "AVX512-VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "AVX-512": "avx512f",
    "AVX2": "avx2",
}
#: Kinds of model, by what most of its products are.
CONVOLUTIONS, LINEARS = "convolutions", "linears"
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


@dataclasses.dataclass(frozen=True, slots=True)
class Race:
    """Two engines that were measured in turns.

    Attributes:
        cpu: a kind of `CPUS`.
        model: `CONVOLUTIONS` or `LINEARS`.
        faster: name of a backend.
        slower: of the other.
        times: how many times as fast, the geometric mean over the models.
        models: what was measured.
    """

    cpu: str
    model: str
    faster: str
    slower: str
    times: float
    models: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.faster} was {self.times:.2g} times as fast as {self.slower} on a CPU with {self.cpu}, "
            f"for models that consist of {self.model} ({', '.join(self.models)})"
        )


RACES: tuple[Race, ...] = (
    Race("AMX", CONVOLUTIONS, "native", "ipex", 1.68, ("MobileNetV2", "ResNet-50")),
    Race("AMX", LINEARS, "native", "ipex", 1.34, ("MiniLM", "BERT-base")),
    Race("AVX512-VNNI", CONVOLUTIONS, "native", "ipex", 1.56, ("MobileNetV2", "ResNet-50")),
    Race("AVX512-VNNI", LINEARS, "native", "ipex", 1.13, ("MiniLM", "BERT-base")),
    Race("AVX-512", CONVOLUTIONS, "native", "ipex", 1.81, ("MobileNetV2",)),
    Race("AVX2", CONVOLUTIONS, "native", "ipex", 1.36, ("MobileNetV2", "ResNet-50")),
    Race("AVX2", LINEARS, "native", "ipex", 1.35, ("MiniLM", "BERT-base")),
)


def kind_of_model(kinds: Iterable[str | None]) -> str:
    """Return the kind of a model with operators of these kinds."""
    found = list(kinds)
    convolutions = sum(kind in _CONVOLUTIONS for kind in found)
    return CONVOLUTIONS if convolutions > found.count("linear") else LINEARS


def kind_of_graph(module: fx.GraphModule) -> str:
    """Return the kind of a captured model."""
    return kind_of_model(map(kind_of_node, module.graph.nodes))


def race_for(features: Collection[str], model: str) -> Race | None:
    """Return what was measured on this kind of CPU with this kind of model.

    Args:
        features: of the CPU, as `nc.kernels.cpu.machine_features` gives them.
        model: `CONVOLUTIONS` or `LINEARS`.
    """
    cpu = next((name for name, feature in CPUS.items() if feature in features), "")
    return next((race for race in RACES if (race.cpu, race.model) == (cpu, model)), None)


def in_order(names: Sequence[str], race: Race | None) -> tuple[str, ...]:
    """Return the names of backends with the faster one of a race before the slower one.

    Other names keep their positions.
    """
    found = list(names)
    if race is not None and race.faster in found and race.slower in found:
        first, second = sorted((found.index(race.faster), found.index(race.slower)))
        found[first], found[second] = race.faster, race.slower
    return tuple(found)
