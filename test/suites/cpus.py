"""Other CPUs than this one."""

from nc.kernels import cpu


def as_cpu(patch, *features):
    """Let nc take this CPU for one that has these features of `cpu.machine_features`, also where some are emulated."""
    has = {*features, "fma", "f16c", *(("avx512bw", "avx512vl") if "avx512f" in features else ())}
    patch.setattr(cpu, "machine_features", lambda: features)
    patch.setattr(cpu, "code_lacks", lambda needed: tuple(name for name in needed if name not in has))
