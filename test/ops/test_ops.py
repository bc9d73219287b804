"""The operators of namespace `nc` alone.

Their schemas, fake implementations and numbers, and all that traces them.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from suites import ragged
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.optests import OpCheckError
from torch.utils import _pytree as pytree

from nc import ops
from nc.formats import dtype
from nc.graph.fx_utils import inline

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
#: What torch has registered, whoever did it.
REGISTERED = sorted(
    f"{s.name.removeprefix('nc::')}.{s.overload_name or 'default'}"
    for s in torch._C._jit_get_all_schemas()
    if s.name.startswith("nc::")
)


def operator_of(name):
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.nc, packet), overload)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call of an operator.

    Attributes:
        expected: the results, in float64, from the arguments as arrays.
        arguments: by position.
        free: index of a tensor among the arguments' leaves → the dimension of it that is the batch.
        tolerance: absolute; 0 for codes.
    """

    expected: Callable[..., object]
    arguments: tuple
    free: dict[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    tolerance: float = 0.0

    def resized(self):
        """The arguments with a batch twice as large."""
        leaves, spec = pytree.tree_flatten(self.arguments)
        for i, dim in self.free.items():
            first = leaves[i]
            leaves[i] = torch.cat([first, first / 2 if first.is_floating_point() else first], dim)
        return pytree.tree_unflatten(leaves, spec)


# ---- brute force, in float64, one element at a time where blocks matter ----


def spread(value, shape, index_of):
    """An array of a shape with the element of a flat `value` that `index_of(index)` says."""
    flat = np.asarray(0 if value is None else value, dtype=np.float64).reshape(-1)
    result = np.empty(shape)
    for index in np.ndindex(*shape):
        result[index] = flat[index_of(index)]
    return result


def quantized(x, scale, zero_point, quant_min, quant_max, index_of=lambda index: 0):
    s, z = (
        spread(value, x.shape, index_of if np.size(value) > 1 else lambda index: 0)
        for value in (scale, zero_point)
    )
    return np.clip(np.rint(x.astype(np.float64) / s) + z, quant_min, quant_max)


def dequantized(codes, scale, zero_point, index_of=lambda index: 0):
    s, z = (
        spread(value, codes.shape, index_of if np.size(value) > 1 else lambda index: 0)
        for value in (scale, zero_point)
    )
    return (codes.astype(np.float64) - z) * s


def channel(axis):
    return lambda index: index[axis]


def block(shape, counts):
    """Flat index of the block that an element is in."""
    return lambda index: int(
        np.ravel_multi_index([i * c // s for i, s, c in zip(index, shape, counts, strict=True)], counts)
    )


def group(shape, axis, size):
    counts = [s // size if d == axis % len(shape) else s for d, s in enumerate(shape)]
    return block(shape, counts)


def dynamic(x, per_token, quant_min, quant_max, symmetric, *_):
    """Each row, or the whole tensor, with the range that it has."""
    result = np.empty(x.shape)
    parts = np.ndindex(*x.shape[:-1]) if per_token else [...]
    for part in parts:
        values = x[part].astype(np.float64)
        low, high = min(values.min(), 0.0), max(values.max(), 0.0)
        if symmetric:
            middle = (quant_min + quant_max + 1) // 2
            scale, zero_point = max(-low, high) / min(quant_max - middle, middle - quant_min), middle
        else:
            scale = (high - low) / (quant_max - quant_min)
            zero_point = np.clip(quant_min - np.rint(low / scale), quant_min, quant_max)
        scale = float(np.float32(scale))
        result[part] = (
            np.clip(np.rint(values / scale) + zero_point, quant_min, quant_max) - zero_point
        ) * scale
    return result


def quantized_float(x, scale, name):
    """The nearest value by distance: its code, or the value itself where the codes are of a dtype of torch.

    Ties to the even code.
    """
    table = np.array(dtype(name).values)
    usable = np.flatnonzero(np.isfinite(table) & ~((table == 0) & np.signbit(table)))
    s = spread(scale, x.shape, block(x.shape, scale.shape) if scale.ndim else lambda index: 0)
    result = np.empty(x.shape)
    for index, number in np.ndenumerate(x / s.astype(np.float32)):
        distance = np.abs(table[usable] - np.clip(number, table[usable].min(), table[usable].max()))
        code = min(usable[distance == distance.min()], key=lambda c: c % 2)
        result[index] = code if dtype(name).storage is torch.uint8 else table[code]
    return result


def dequantized_float(codes, scale, name):
    return np.array(dtype(name).values)[codes] * spread(
        scale, codes.shape, block(codes.shape, scale.shape) if scale.ndim else lambda index: 0
    )


def simulated(x, scale, zero_point, name, *_):
    """The codes of the formats above, and what they stand for."""
    if dtype(name).kind == "float":
        return dequantized_float(quantized_float(x, scale, name).astype(np.int64), scale, name)
    blocks = block(x.shape, scale.shape)
    return dequantized(
        quantized(x, scale, zero_point, dtype(name).quant_min, dtype(name).quant_max, blocks),
        scale,
        zero_point,
        blocks,
    )


def simulated_dynamic(x, name, text, symmetric, *_):
    return dynamic(x, text == "per_token", dtype(name).quant_min, dtype(name).quant_max, symmetric)


def bf16(x):
    """Nearest, ties to even: by the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def recurrent(
    cell,
    x,
    hx,
    params,
    has_biases,
    layers,
    bidirectional,
    batch_first,
    quant_min,
    quant_max,
    dtype,
    per_token=False,
    relu=None,
):
    """Step by step, as `torch.nn.LSTM` documents it, with the input of a layer and each hidden state quantized by their own ranges."""

    def rounded(values):
        return (
            dynamic(values.astype(np.float32), per_token, quant_min, quant_max, False)
            if values.any()
            else values
        )

    steps = (x.swapaxes(0, 1) if batch_first else x).astype(np.float64)
    states = [hx] if isinstance(hx, np.ndarray) else hx
    each, at, last = len(params) // (layers * (1 + bidirectional)), 0, []
    for _ in range(layers):
        sides = []
        for direction in range(1 + bidirectional):
            w, u, *others = (p.astype(np.float64) for p in params[at : at + each])
            b, c = others[:2] if has_biases else (0.0, 0.0)
            at += each
            state = [s[len(last)].astype(np.float64) for s in states]
            read = rounded(steps)
            outputs = [None] * len(steps)
            for t in reversed(range(len(steps))) if direction else range(len(steps)):
                state = cell(read[t] @ w.T + b, rounded(state[0]) @ u.T + c, state)
                if len(others) % 2:
                    state[0] = rounded(state[0]) @ others[-1].T
                outputs[t] = state[0]
            sides.append(np.stack(outputs))
            last.append(state)
        steps = np.concatenate(sides, -1)
    return (steps.swapaxes(0, 1) if batch_first else steps, *(np.stack(s) for s in zip(*last, strict=True)))


def lstm_cell(a, b, state):
    i, f, g, o = np.split(a + b, 4, -1)
    c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    return [sigmoid(o) * np.tanh(c), c]


def gru_cell(a, b, state):
    (r, z, n), (hr, hz, hn) = np.split(a, 3, -1), np.split(b, 3, -1)
    update = sigmoid(z + hz)
    return [(1 - update) * np.tanh(n + sigmoid(r + hr) * hn) + update * state[0]]


def tanh_cell(a, b, state):
    return [np.tanh(a + b)]


def relu_cell(a, b, state):
    return [np.maximum(a + b, 0)]


# ---- samples ----

SHAPE = (4, 6, 8)


def packed_int4():
    """A weight of shape [6, 12] in three groups with zero points: codes, scale, zero, and nothing else."""
    return (
        torch.randint(0, 256, (6, 6), dtype=torch.uint8),
        torch.rand(6, 3) + 0.1,
        torch.randint(0, 256, (6, 2), dtype=torch.uint8),
        None,
        None,
        None,
    )


def nibbles(packed, count):
    """4-bit codes, the low half of a byte first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :count].astype(np.float64)


def low_bit_weight(packed, scale, zero):
    groups = scale.shape[1]
    return (nibbles(packed, 12) - np.repeat(nibbles(zero, groups), 12 // groups, 1)) * np.repeat(
        scale.astype(np.float64), 12 // groups, 1
    )


def low_bit_linear(x, packed, scale, zero, _minimum, _outer, _outer_minimum, bias, *_):
    return x.astype(np.float64) @ low_bit_weight(packed, scale, zero).T + bias


def low_bit_rows(ids, packed, scale, zero, *_):
    return low_bit_weight(packed, scale, zero)[ids]


def values(*shape):
    """Multiples of an eighth: quotients by the scales below are exact, and many are ties."""
    return torch.randint(-200, 200, shape) / 8


def codes(*shape, signed=True):
    return (
        torch.randint(-128, 128, shape, dtype=torch.int8)
        if signed
        else torch.randint(0, 256, shape, dtype=torch.uint8)
    )


def scales(*shape):
    """Powers of two."""
    return 2.0 ** torch.randint(-3, 1, shape)


def zero_points(*shape):
    return torch.randint(-20, 20, shape)


def layers_of(cls, **options):
    """Initial state and weights."""
    layer = cls(6, 8, **options)
    params = [p.detach() for p in layer.parameters()]
    directions = layer.num_layers * (1 + layer.bidirectional)
    hx = [torch.randn(directions, 4, layer.proj_size or 8), torch.randn(directions, 4, 8)][
        : 2 if cls is nn.LSTM else 1
    ]
    flags = layer.bias, layer.num_layers, layer.bidirectional, layer.batch_first
    return (hx if cls is nn.LSTM else hx[0]), params, *flags, 0, 255, torch.uint8


INT8, UINT8 = (-128, 127, torch.int8), (0, 255, torch.uint8)
#: name of an operator → its calls; made when a test asks, from the test's own seed.
STARTS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


def text_bias(starts, rows, table, _):
    """What a row adds to the score of another one, row by row."""
    count = len(rows)
    text = [sum(int(start) <= row for start in starts) - 1 for row in range(count)]
    heads = 1 if table is None else len(table)
    result = np.full((1, heads, count, count), np.finfo(np.float32).min)
    for head, i, j in np.ndindex(heads, count, count):
        if text[i] == text[j]:
            begin = int(starts[text[i]])
            result[0, head, i, j] = 0 if table is None else table[head, i - begin, j - begin]
    return result


def text_sums(x, starts, keepdim):
    sums = [x[0, a:b].astype(np.float64).sum(0) for a, b in itertools.pairwise(starts)]
    return np.stack(sums)[:, None] if keepdim else np.stack(sums)


def text_attention(q, k, v, starts, of_queries, of_keys, query_columns, key_columns, scale):
    """Attention of each text by itself, with what is added to scores pair by pair; the rest is a text."""
    given = ((of_queries, query_columns), (of_keys, key_columns))
    distances = [
        None if vectors is None else tuple(torch.as_tensor(x) for x in (vectors, column))
        for vectors, column in given
    ]
    rows = [torch.as_tensor(x)[0].transpose(0, 1) for x in (q, k, v)]
    ends = [*map(int, starts), len(rows[0])]
    y = ragged.attention(*rows, ends, ends, factor=scale, distances=distances)
    return y.transpose(0, 1)[None].numpy()


BUCKETS = torch.tensor([3, 3, 3, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32)


def sides():
    """Queries, keys and values."""
    return tuple(values(1, 2, 8, width) / 16 for width in (4, 4, 6))


SAMPLES = {
    "segment_attention.default": lambda: [
        Sample(
            text_attention,
            (*sides(), STARTS, values(2, 4, 4), values(2, 4, 4), BUCKETS, BUCKETS.flip(0), 0.3),
            {0: 2, 1: 2, 2: 2},
            1e-4,
        ),
        Sample(
            text_attention,
            (*sides(), STARTS, None, values(2, 4, 4), None, BUCKETS, 0.3),
            {0: 2, 1: 2, 2: 2},
            1e-4,
        ),
    ],
    "segment_bias.default": lambda: [
        Sample(text_bias, (STARTS, torch.arange(8), None, 8), {1: 0}),
        Sample(text_bias, (STARTS, torch.arange(8), values(2, 16, 16), 16), {1: 0}),
    ],
    "segment_sum.default": lambda: [
        Sample(text_sums, (values(1, 8, 5), STARTS, False), {0: 2}, 1e-5),
        Sample(text_sums, (values(1, 8, 2, 3), STARTS, True), {0: 2}, 1e-5),
        Sample(text_sums, (codes(1, 8, 4, signed=True), STARTS, False), {0: 2}),
    ],
    "quantize_per_tensor.default": lambda: [
        Sample(
            lambda x, s, z, low, high, _: quantized(x, s, z, low, high), (values(*SHAPE), 0.25, 3, *UINT8)
        ),
        Sample(
            lambda x, s, z, low, high, _: quantized(x, s, z, low, high),
            (values(3, 5).t(), 0.5, -7, -64, 63, torch.int8),
        ),
    ],
    "dequantize_per_tensor.default": lambda: [
        Sample(
            lambda q, s, z, _: dequantized(q, s, z),
            (codes(*SHAPE, signed=False), 0.1, 12, torch.uint8),
            tolerance=1e-5,
        )
    ],
    "quantize_per_tensor.tensor": lambda: [
        Sample(
            lambda x, s, z, low, high, _: quantized(x, s, z, low, high),
            (values(*SHAPE), scales(), zero_points(), *INT8),
        ),
        Sample(
            lambda x, s, z, low, high, _: quantized(x, s, z, low, high, block(x.shape, s.shape)),
            (values(*SHAPE), scales(1, 3, 4), zero_points(1, 3, 4), *INT8),
        ),
    ],
    "dequantize_per_tensor.tensor": lambda: [
        Sample(lambda q, s, z, _: dequantized(q, s, z), (codes(*SHAPE), scales(), None, torch.int8)),
        Sample(
            lambda q, s, z, _: dequantized(q, s, z, block(q.shape, s.shape)),
            (codes(*SHAPE), scales(1, 2, 8), zero_points(1, 2, 8), torch.int8),
        ),
    ],
    "quantize_per_channel.default": lambda: [
        Sample(
            lambda x, s, z, axis, low, high, _: quantized(x, s, z, low, high, channel(axis)),
            (values(*SHAPE), scales(6), z, 1, *INT8),
        )
        for z in (None, zero_points(6))
    ],
    "dequantize_per_channel.default": lambda: [
        Sample(
            lambda q, s, z, axis, _: dequantized(q, s, z, channel(axis)),
            (codes(*SHAPE), scales(8), z, -1, torch.int8),
        )
        for z in (None, zero_points(8))
    ],
    "quantize_per_group.default": lambda: [
        Sample(
            lambda x, s, z, axis, size, low, high, _: quantized(
                x, s, z, low, high, group(x.shape, axis, size)
            ),
            (values(6, 8), scales(6, 2), z, -1, 4, -8, 7, torch.int8),
            free,
        )
        for z, free in ((None, {0: 0, 1: 0}), (zero_points(6, 2), {0: 0, 1: 0, 2: 0}))
    ],
    "dequantize_per_group.default": lambda: [
        Sample(
            lambda q, s, z, axis, size, _: dequantized(q, s, z, group(q.shape, axis, size)),
            (codes(8, 6), scales(4, 6), zero_points(4, 6), 0, 2, torch.int8),
            {0: 1, 1: 1, 2: 1},
        )
    ],
    "quantize_float.default": lambda: [
        Sample(quantized_float, (values(*SHAPE), torch.tensor(0.25), "fp4_e2m1")),
        Sample(quantized_float, (values(*SHAPE), scales(1, 3, 4), "fp8_e4m3")),
    ],
    "dequantize_float.default": lambda: [
        Sample(dequantized_float, (codes(*SHAPE, signed=False) % 16, scales(1, 2, 8), "nf4"), tolerance=1e-6),
        # codes of FP8, which torch's checks cannot compare, are in test_formats.py
        Sample(dequantized_float, (codes(*SHAPE, signed=False) % 64, torch.tensor(0.25), "fp6_e3m2")),
    ],
    # rounding modes, scale types and granularities are in test_fake_quant.py
    "fake_quantize.default": lambda: [
        Sample(simulated, (values(*SHAPE), torch.tensor(0.25), None, "fp4_e2m1", "half_even", 0)),
        Sample(simulated, (values(*SHAPE), scales(1, 3, 4), zero_points(1, 3, 4), "int8", "half_even", 0)),
    ],
    "fake_quantize_dynamic.default": lambda: [
        Sample(
            simulated_dynamic,
            (torch.randn(*SHAPE), "int8", text, True, "half_even", "fp32", False, 0),
            tolerance=1e-6,
        )
        for text in ("per_tensor", "per_token")
    ],
    # formats, second levels of scales and activations are in test_low_bit_formats.py and
    # test_low_bit_engines.py
    "quant_linear.default": lambda: [
        Sample(
            low_bit_linear,
            (torch.randn(3, 4, 12), *packed_int4(), torch.randn(6), "int4", 12, "fp32"),
            tolerance=1e-5,
        ),
    ],
    "quant_embedding.default": lambda: [
        Sample(
            low_bit_rows,
            (torch.randint(0, 6, (3, 4)), *packed_int4(), "int4", 12, torch.float32),
            tolerance=1e-6,
        ),
    ],
    "quantize_dequantize_dynamic.default": lambda: [
        Sample(dynamic, (torch.randn(*SHAPE), per_token, *limits, symmetric, dtype), tolerance=1e-6)
        for per_token in (False, True)
        for (*limits, dtype), symmetric in ((UINT8, False), (INT8, True))
    ],
    "to_bf16.default": lambda: [
        Sample(bf16, (torch.randn(*SHAPE),)),
        Sample(bf16, (torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8], [-3.3, 0]]),)),
    ],
    "from_bf16.default": lambda: [Sample(lambda x: x, (torch.randn(*SHAPE).to(torch.bfloat16),))],
    "lstm_dynamic.default": lambda: [
        Sample(
            lambda *a: recurrent(lstm_cell, *a),
            (torch.randn(5, 4, 6), *layers_of(nn.LSTM)),
            {0: 1, 1: 1, 2: 1},
            1e-5,
        ),
        Sample(
            lambda *a: recurrent(lstm_cell, *a),
            (torch.randn(4, 5, 6), *layers_of(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True)),
            {0: 0, 1: 1, 2: 1},
            1e-5,
        ),
        Sample(
            lambda *a: recurrent(lstm_cell, *a),
            (torch.randn(5, 4, 6), *layers_of(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3), True),
            {0: 1, 1: 1, 2: 1},
            1e-5,
        ),
    ],
    "rnn_dynamic.default": lambda: [
        Sample(
            lambda *a: recurrent(tanh_cell, *a),
            (torch.randn(5, 4, 6), *layers_of(nn.RNN), True, False),
            {0: 1, 1: 1},
            1e-5,
        ),
        Sample(
            lambda *a: recurrent(relu_cell, *a),
            (torch.randn(4, 5, 6), *layers_of(nn.RNN, bidirectional=True, batch_first=True), False, True),
            {0: 0, 1: 1},
            1e-5,
        ),
    ],
    "gru_dynamic.default": lambda: [
        Sample(
            lambda *a: recurrent(gru_cell, *a),
            (torch.randn(5, 4, 6), *layers_of(nn.GRU, bias=False)),
            {0: 1, 1: 1},
            1e-5,
        ),
        Sample(
            lambda *a: recurrent(gru_cell, *a),
            (torch.randn(4, 5, 6), *layers_of(nn.GRU, num_layers=2, bidirectional=True, batch_first=True)),
            {0: 0, 1: 1},
            1e-5,
        ),
    ],
}


def array(value):
    """NumPy knows no bf16."""
    if not isinstance(value, torch.Tensor):
        return value
    return (value.float() if value.is_floating_point() else value).numpy()


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def assert_correct(sample, arguments, results):
    """Against brute force."""
    expected = as_tuple(sample.expected(*pytree.tree_map(array, arguments)))
    assert len(expected) == len(results)
    for wanted, got in zip(expected, results, strict=True):
        assert wanted.shape == tuple(got.shape)
        assert np.abs(wanted - got.double().numpy()).max() <= sample.tolerance


def assert_same(expected, got):
    for a, b in zip(as_tuple(expected), as_tuple(got), strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


class Calls(nn.Module):
    """A small function around one operator; tensors are its inputs, the rest are constants of it."""

    def __init__(self, operator, arguments):
        super().__init__()
        self.operator = operator
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors):
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        results = self.operator(*pytree.tree_unflatten(leaves, self.spec))
        return tuple(result.clone() for result in as_tuple(results))


def tensors_of(arguments):
    return tuple(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))


def targets(graph):
    return [
        node.target
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("nc.")
    ]


def check(operator, arguments, checks=ALL_CHECKS):
    """torch's own checks of an operator, and the layout that the fake implementation says, which older torch does not compare."""
    torch.library.opcheck(operator, arguments, test_utils=checks)
    mode = FakeTensorMode()
    with mode:
        fakes = as_tuple(operator(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)))
    for fake, real in zip(fakes, as_tuple(operator(*arguments)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        assert fake.stride() == real.stride() or not real.numel()


# ---- tests ----


def test_every_registered_operator_has_samples_and_a_reference():
    assert sorted(SAMPLES) == REGISTERED
    assert {operator_of(name) for name in REGISTERED} == set(ops.REFERENCE)
    assert ops.QUANTIZE | ops.DEQUANTIZE | {*ops.RECURRENT.values()} < set(ops.REFERENCE)


@pytest.mark.parametrize("name", REGISTERED)
def test_schema_and_fake_implementation_hold(name):
    for sample in SAMPLES[name]():
        check(operator_of(name), sample.arguments)


@pytest.mark.parametrize("name", REGISTERED)
def test_numbers_are_those_of_brute_force(name):
    for sample in SAMPLES[name]():
        for arguments in (sample.arguments, sample.resized()):
            assert_correct(sample, arguments, as_tuple(operator_of(name)(*arguments)))


@pytest.mark.parametrize("name", REGISTERED)
def test_an_operator_is_exported_as_it_is(name):
    """One node in the program, with free sizes where the sample has a batch."""
    operator = operator_of(name)
    for sample in SAMPLES[name]():
        module, inputs, others = (
            Calls(operator, sample.arguments),
            tensors_of(sample.arguments),
            tensors_of(sample.resized()),
        )
        batch = torch.export.Dim("batch", min=2)
        places = dict.fromkeys(module.places)
        shapes = tuple({sample.free[place]: batch} if place in sample.free else None for place in places)
        program = torch.export.export(module, inputs, dynamic_shapes=(shapes,), strict=False)
        assert targets(program.graph) == [operator]
        for tensors in (inputs, others):
            assert_same(module(*tensors), program.module()(*tensors))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", REGISTERED)
def test_an_operator_is_traced_as_it_is_and_interpreted(name, tracing):
    operator = operator_of(name)
    for sample in SAMPLES[name]():
        module, inputs = Calls(operator, sample.arguments), tensors_of(sample.arguments)
        traced = make_fx(module, tracing_mode=tracing)(*inputs)
        assert targets(traced.graph) == [operator]
        expected = module(*inputs)
        assert_same(expected, traced(*inputs))
        assert_same(expected, fx.Interpreter(traced).run(*inputs))
        if tracing == "symbolic":
            assert_same(module(*tensors_of(sample.resized())), traced(*tensors_of(sample.resized())))
        inline(traced)  # what compilers are given
        traced.recompile()
        assert targets(traced.graph) == []
        assert_same(expected, traced(*inputs))


@pytest.mark.parametrize("name", REGISTERED)
def test_an_empty_batch_gives_an_empty_result(name):
    for sample in SAMPLES[name]():
        leaves, spec = pytree.tree_flatten(sample.arguments)
        empty = [
            leaf.narrow(sample.free[i], 0, 0) if i in sample.free else leaf for i, leaf in enumerate(leaves)
        ]
        arguments = pytree.tree_unflatten(empty, spec)
        check(operator_of(name), arguments, ("test_schema", "test_faketensor"))
        for result in as_tuple(operator_of(name)(*arguments)):
            assert result.numel() == 0


WRONG = {
    "dtype": lambda x: torch.empty_like(x),
    "shape": lambda x: x.new_empty(x.shape[:-1], dtype=torch.uint8),
    "layout": lambda x: torch.empty_like(x, dtype=torch.uint8).t().contiguous().t(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_fake_implementation_that_is_wrong_is_found(what):
    """The check above can fail: an operator like ours, whose fake implementation says something else."""
    name = f"quantize_{what}"
    library = torch.library.Library("nc_wrong", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: ops.quantize_per_tensor(x, 0.25, 3, *UINT8), "CompositeExplicitAutograd")
    torch.library.register_fake(f"nc_wrong::{name}", WRONG[what], lib=library)
    operator = getattr(torch.ops.nc_wrong, name).default
    with pytest.raises((OpCheckError, AssertionError)):
        check(operator, (values(4, 6),))


def test_heads_share_queries_and_keys_with_scores_by_distance():
    q, k, v = sides()
    vectors = values(2, 4, 4), values(2, 4, 4)

    def attended(q, k):
        return ops.segment_attention(q, k, v, STARTS, *vectors, BUCKETS, BUCKETS.flip(0), 0.3)

    for x in (q, k):
        one = x[:, :1]
        both = one.expand_as(x)
        given, whole = ((one, k), (both, k)) if x is q else ((q, one), (q, both))
        torch.testing.assert_close(attended(*given), attended(*whole))
