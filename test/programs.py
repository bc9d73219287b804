"""Random programs on tensors: a `torch.nn.Module` from a list of lines, so that what fails prints as code.

Lines are drawn one after the other and run at once on small tensors; what does not apply to the shapes at
hand is dropped.
"""

import copy
import linecache
import math
import operator
import re
import types

import torch
from torch import nn
from torch.nn import functional as F

from nc.numerics.metrics import sqnr_db

_LARGEST, _ELEMENTS, _RANK = 1e4, 4096, 5

#: Lines with places: {x} and {y} for values (y of any shape), {a}, {b} for dimensions, {n} for a small
#: number, {c} for a scalar.
ELEMENTWISE = """
F.relu({x}) | F.relu6({x}) | F.hardtanh({x}, -0.5, 1.5) | torch.clamp({x}, -1, 2) | torch.clamp({x}, min=0) | torch.clamp({x}, max={c})
F.gelu({x}) | F.gelu({x}, approximate="tanh") | F.silu({x}) | F.hardswish({x}) | F.hardsigmoid({x}) | torch.sigmoid({x}) | torch.tanh({x})
F.leaky_relu({x}, 0.1) | F.elu({x}) | F.mish({x}) | -{x} | {x}.abs() | {x}.masked_fill({x} > 0, {c}) | torch.where({x} > 0, {x}, {y})
{x} * ({x} > 0) | torch.div({x}, 0.3, rounding_mode="floor") | F.dropout({x}, 0.5, self.training) | {x}.double().float()
torch.clamp({x}, min={x}.mean()) | torch.maximum({x}, {y}) | {x}.detach()
"""
SCALARS = """
{x} + {c} | {c} + {x} | {x} - {c} | {c} - {x} | {x} * {c} | {c} * {x} | {x} / {c} | {x} + {n} | torch.add({x}, {n}, alpha=3)
torch.add({x}, {x}, alpha=2) | torch.add({x}, {y}, alpha=-0.5) | torch.sub({x}, {y}, alpha=2) | {x} + {x}.shape[{a}]
{x}.shape[{a}] + {x} | {x} * ({x}.shape[{a}] // 2 + 1) | {x} / {x}.shape[{a}] ** 0.5 | {x} + torch.tensor({c})
{x} + (3 + {x}.size(0) * 2) | torch.add({c}, {x})
"""
BINARY = """
{x} + {y} | {x} + {x} | {x} + {y} | {x} * {y} | {x} - {y} | {x}.add({y}) | {x} @ {x}.transpose(-1, -2) | {x} @ {y}
torch.matmul({x}, {y}) | {x} @ {y}.transpose(-1, -2) | torch.bmm({x}, {x}.transpose(1, 2)) | torch.bmm({x}, {y}) | torch.mm({x}, {y}.t())
{x}.matmul({x}[0].t()) | torch.einsum("bij,bkj->bik", {x}, {y}) | torch.baddbmm({y}, {x}, {x})
F.linear({x}, {y}.reshape(-1, {x}.shape[-1])) | torch.softmax({x} @ {x}.transpose(-1, -2) / {n}, -1) @ {x}
torch.softmax({x} @ {y}.transpose(-1, -2) * 0.5 + {c}, -1) @ {y} | F.scaled_dot_product_attention({x}, {y}, {y})
torch.matmul({x}, self.matrix[: {x}.shape[-1]]) | {x} + self.matrix[0, : {x}.shape[-1]]
"""
MOVES = """
{x}.transpose({a}, {b}) | {x}.transpose(1, -1) | {x}.unsqueeze({a}) | {x}.squeeze({a}) | {x}.flatten({a}) | {x}.flatten(1)
{x}.contiguous() | {x}.clone() | {x}.flip({a}) | {x}.roll({n}, {a}) | {x}[..., -3:] | {x}[:, 1:-1] | {x}[:, ::2]
{x}[:, : {x}.shape[1] // 2] | {x}[:, -1] | {x}[..., 0] | {x}[:, None] | {x}.select({a}, -1) | {x}.narrow({a}, 1, 2)
{x}.movedim({a}, {b}) | {x}.swapaxes(-1, -2) | {x}.view({x}.size(0), -1) | {x}.reshape({x}.shape[0], {x}.shape[1] // 2, 2, *{x}.shape[2:])
{x}.unflatten(-1, (2, -1)) | {x}.t() | {x}.reshape(-1, {x}.shape[-1]) | {x}.reshape({x}.shape[0] * {x}.shape[1], -1)
{x}.expand({n}, *{x}.shape) | {x}[:1].expand_as({x}) | {x}.index_select({a}, torch.arange(2)) | {x}[:, [0, -1]]
{x}[:, torch.arange({x}.shape[1] - 1, -1, -1)] | F.pad({x}, (1, 1)) | F.pad({x}, (-1, 2, 0, 1)) | F.pad({x}, (1, 0), value={c})
F.pad({x}, (1, 1, 1, 1)) | {x}.chunk(2, {a})[-1] | {x}.chunk(2, {a})[0] | {x}.split([1, {x}.shape[1] - 1], 1)[1] | {x}.split(2, {a})[-1]
{x}.unbind({a})[-1] | {x}.tensor_split(2, {a})[1] | {x}.repeat_interleave(2, {a}) | {x}.tile(2) | {x}.repeat(1, *[1] * ({x}.dim() - 2), 2)
F.pixel_shuffle({x}, 2) | F.channel_shuffle({x}, 2) | F.interpolate({x}, scale_factor=2)
{x}.view({x}.shape[0], 2, {x}.shape[1] // 2, *{x}.shape[2:]).transpose(1, 2).reshape({x}.shape) | {x}.permute(*range(1, {x}.dim()), 0)
{x}.permute(0, *range({x}.dim() - 1, 0, -1))
"""
JOINS = """
torch.cat([{x}, {y}], {a}) | torch.cat([{x}, {x}], {a}) | torch.stack([{x}, {y}], {a}) | torch.stack([{x}, {x}], 1)
torch.cat({x}.chunk(2, {a}), {b}) | torch.cat([{x}, {y}, {x}], -1) | torch.cat([{x}]) | torch.cat(({x}[:, 1:], {x}[:, :1]), 1)
torch.cat({x}.unbind(1), -1) | torch.stack({x}.split(2, 1)) | torch.cat([{x}, {c} * torch.ones_like({x})], {a})
torch.cat([{x}, {x}.new_zeros({x}.shape[0], 1, *{x}.shape[2:])], 1)
"""
REDUCTIONS = """
torch.softmax({x}, {a}) | F.log_softmax({x}, -1) | {x}.mean({a}) | {x}.mean({a}, keepdim=True) | {x}.sum(-1) | {x}.max({a}).values
{x}.mean((-1, -2)) | {x}.topk(2, {a})[0] | {x}.sort({a})[0] | {x}.amax(-1, keepdim=True) | F.layer_norm({x}, {x}.shape[-1:])
F.normalize({x}, dim={a}) | {x}.mean() | {x}.max({a})[0] + {x}.min({a})[0] | torch.max({x}, {y}) | {x}.std(-1, keepdim=True)
{x} * {x}.argmax({a}, keepdim=True) | {x}.cumsum({a})
"""
POOLS = """
F.max_pool2d({x}, 2) | F.max_pool2d({x}, 3, 1, 1) | F.max_pool2d({x}, 3, 2, 1, ceil_mode=True) | F.avg_pool2d({x}, 2)
F.avg_pool2d({x}, 3, 1, 1) | F.avg_pool2d({x}, 3, 1, 1, count_include_pad=False) | F.adaptive_avg_pool2d({x}, 1)
F.adaptive_avg_pool2d({x}, (2, 1)) | F.adaptive_max_pool2d({x}, 2) | F.max_pool1d({x}, 2) | F.avg_pool1d({x}, 2)
F.adaptive_avg_pool1d({x}, 2) | F.adaptive_max_pool2d({x}, 1) | F.max_pool2d({x}, 2, return_indices=True)[0]
"""
IN_PLACE = """
{x}.relu_() | {x}.add_({y}) | {x}.mul_({c}) | F.relu({x}, inplace=True) | F.hardtanh({x}, inplace=True) | {x}.clone().add_({c})
{x}.sub_({c}) | {x}[:, 0].mul_(2) | {x}.clamp_(min=-1) | {x}.masked_fill_({x} > 1, 0)
"""
#: Calls of a module: how it is made (with {i} inputs at its axis) and called.
MODULES = (
    *[("nn.Linear({i}, {o})", "{m}({x})", -1)] * 6,
    ("nn.Linear({i}, {i})", "{m}({m}({x}))", -1),
    ("nn.Linear({i}, {o}, bias=False)", "{m}({x}.flip(0))", -1),
    ("nn.Linear({i}, {o})", "F.relu({m}({x}))", -1),
    ("nn.Linear({i}, {i})", "{m}({x}) + {x}", -1),
    ("nn.Linear({i}, {i})", "F.linear({x}, {m}.weight * 2, {m}.bias)", -1),
    ("nn.Linear({i}, {i})", "torch.addmm({m}.bias, {x}, {m}.weight)", -1),
    ("nn.Linear({i}, {i})", "torch.add({m}({x}), {x}, alpha=2)", -1),
    ("nn.Linear({i}, {o})", "{y} + F.relu({m}({x}))", -1),
    ("nn.Linear({i}, {o})", "torch.add({c}, {m}({x}) + {y}, alpha=3)", -1),
    ("nn.LayerNorm({i})", "{m}({x})", -1),
    ("nn.Embedding(8, {o})", "{m}({x}.argmax(-1) % 8)", -1),
    ("nn.LSTM({i}, {o}, batch_first=True)", "{m}({x})[0]", -1),
    ("nn.GRU({i}, {o}, bidirectional=True)", "{m}({x})[0]", -1),
    ("nn.LSTM({i}, {o})", "{m}({x})[1][0]", -1),
    *[("nn.Conv2d({i}, {o}, 3, padding=1)", "{m}({x})", -3)] * 3,
    ("nn.Conv2d({i}, {o}, 1)", "{m}({x})", -3),
    ("nn.Conv2d({i}, {o}, 1, stride=2)", "{m}({x})", -3),
    ("nn.Conv2d({i}, {o}, 3, stride=2, dilation=2, padding=2, bias=False)", "{m}({x})", -3),
    ("nn.Conv2d({i}, {i}, 3, padding='same', groups={i})", "{m}({x})", -3),
    ("nn.Conv2d({i}, {o}, 2, padding='same')", "{m}({x})", -3),
    ("nn.Conv2d({i}, {o}, 3, padding=1, padding_mode='reflect')", "{m}({x})", -3),
    ("nn.Conv2d({i}, {i}, 3, padding=1)", "F.relu({m}({x}) + {x})", -3),
    ("nn.Conv2d({i}, {i}, 1)", "F.relu(torch.add({x}, {m}({x}), alpha=-0.5))", -3),
    ("nn.Conv2d({i}, {o}, 1)", "F.relu6({m}({x}) + {c})", -3),
    ("nn.Conv2d({i}, {i}, 1)", "{x} * torch.sigmoid({m}(F.adaptive_avg_pool2d({x}, 1)))", -3),
    ("nn.Sequential(nn.Conv2d({i}, {o}, 3, bias=False), nn.BatchNorm2d({o}), nn.ReLU())", "{m}({x})", -3),
    ("nn.BatchNorm2d({i})", "{m}({x})", -3),
    ("nn.GroupNorm(1, {i})", "{m}({x})", -3),
    ("nn.ConvTranspose2d({i}, {o}, 2, stride=2)", "{m}({x})", -3),
    ("nn.Conv1d({i}, {o}, 3, padding=1)", "{m}({x})", -2),
    ("nn.Conv1d({i}, {i}, 3, stride=2)", "F.gelu({m}({x}))", -2),
    ("nn.ConvTranspose1d({i}, {o}, 3)", "{m}({x})", -2),
)
_KINDS = [
    ELEMENTWISE,
    SCALARS,
    BINARY,
    MOVES,
    MOVES,
    JOINS,
    REDUCTIONS,
    POOLS,
    MODULES,
    MODULES,
    MODULES,
    IN_PLACE,
]
_LINES = {
    kind: [line.strip() for row in kind.strip().splitlines() for line in row.split(" | ")]
    for kind in _KINDS
    if kind is not MODULES
}
_SHAPES = ((2, 4, 8, 8), (2, 3, 8, 6), (2, 6, 8), (3, 4, 4), (2, 8), (4, 6), (2, 4, 6, 6))
_NAMESPACE = {"torch": torch, "nn": nn, "F": F, "math": math, "operator": operator}


class Program(nn.Module):
    """`forward` is the lines; `inputs` are its arguments; printing it shows both."""

    def __init__(self, shapes):
        super().__init__()
        self.inputs = tuple(torch.randn(shape) for shape in shapes)
        self.names = [f"x{i}" for i in range(len(shapes))]
        self.made, self.lines = [], []
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def finish(self, outputs):
        """Compile `forward`; its source is shown in tracebacks."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        source = (
            f"def forward(self, {names}):\n"
            + "".join(f"    {line}\n" for line in self.lines)
            + f"    return {outputs}\n"
        )
        file = f"<program {id(self)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        scope = dict(_NAMESPACE)
        exec(compile(source, file, "exec"), scope)  # the lines above
        self.forward = types.MethodType(scope["forward"], self)
        self.source = source
        return self.eval()

    def __repr__(self):
        shapes = ", ".join(str(tuple(t.shape)) for t in self.inputs)
        return f"\n# inputs {shapes}\n" + "".join(f"# self.{made}\n" for made in self.made) + self.source

    __str__ = __repr__


def program(rng, steps=8, in_place=False):
    """A program of at most so many lines.

    Args:
        rng: `random.Random`; hypothesis has one that it can shrink.
        steps: how many lines are tried.
        in_place: whether some may change tensors.
    """
    torch.manual_seed(rng.randrange(1000))
    shape = rng.choice(_SHAPES)
    model = Program([shape] if rng.random() < 0.7 else [shape, rng.choice([shape, shape, *_SHAPES])])
    values = {name: t.clone() for name, t in zip(model.names, model.inputs, strict=True)}
    kinds = [kind for kind in _KINDS if in_place or kind is not IN_PLACE]
    for _ in range(steps):
        _try(model, values, rng, rng.choice(kinds))
    text = "\n".join(line.partition(" = ")[2] for line in model.lines)
    unread = [name for name in values if name not in model.names and not re.search(rf"\b{name}\b", text)]
    others = [name for name in values if name not in unread and rng.random() < 0.1]
    names = [name for name in (*unread, *others) if _is_stable(model, name)]
    return model.finish(f"({', '.join(names or model.names[:1])},)")


def _is_stable(model, name):
    """Whether a value is more than rounding noise, such as the sum of what a layer norm gives.

    Fp32 and fp64 agree on it.
    """
    single = _run(model.finish(name), torch.float32)
    double = copy.deepcopy(model).double()
    double.forward = types.MethodType(model.forward.__func__, double)
    try:
        exact = _run(double, torch.float64)
    except RuntimeError:
        return True  # a line that names fp32 does not mix with fp64
    return sqnr_db(exact, single) > 60


def _try(model, values, rng, kind):
    """Add a line, where it applies: where the program still runs, and gives a value of a sensible size."""
    names = list(values)
    x = rng.choice([names[-1], names[-1], rng.choice(names)])
    rank = values[x].dim()
    places = {
        "x": x,
        "y": rng.choice(names),
        "n": rng.choice([1, 2, 3]),
        "c": rng.choice([0.5, -1.5, 2.0]),
        "o": rng.choice([4, 6, 8]),
    }
    places |= {k: rng.randrange(-rank, rank) if rank else 0 for k in ("a", "b")}
    module, name = f"m{len(model.made)}", f"v{len(model.lines)}"
    how, line = None, ""
    try:
        if kind is MODULES:
            how, line, axis = rng.choice(kind)
            how, line = (
                how.format(**places, i=values[x].shape[axis]),
                line.format(**places, m=f"self.{module}"),
            )
            setattr(model, module, eval(how, _NAMESPACE).eval())
        else:
            line = rng.choice(_LINES[kind]).format(**places)
        model.lines.append(f"{name} = {line}")
        found = _run(model.finish(f"{{{', '.join(f'{n!r}: {n}' for n in (*names, name))}}}"), torch.float32)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        found = {}
    if name in found and all(map(_is_sensible, found.values())):
        values |= found
        model.made += [f"{module} = {how}"] if how is not None else []
    else:
        del model.lines[len(names) - len(model.names) :]


def _is_sensible(value):
    fine = (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.float32
        and 0 < value.numel() <= _ELEMENTS
        and value.dim() <= _RANK
    )
    return fine and bool(value.isfinite().all()) and value.abs().max() <= _LARGEST


def _run(model, dtype):
    with torch.no_grad():
        return model(*(t.to(dtype, copy=True) for t in model.inputs))
