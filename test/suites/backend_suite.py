"""What every backend must do.

A subclass names the backend; a case that it can't pass it overrides and says why.
"""

import threading
import traceback

import pytest
import torch
from models import (
    FP32,
    MLP,
    Attention,
    Conv1dNet,
    Conv3dNet,
    FlattenedAttention,
    Function,
    ResidualCNN,
    TransposeNet,
    call,
    prepared_for,
    quantized,
    worst_db,
)
from torch import nn
from torch.nn import functional as F

from nc import StaticQuantConfig, convert, load


class GatedCNN(nn.Module):
    """Squeeze-and-excitation and a broadcast shortcut, as in MobileNetV3 and EfficientNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.hardswish(self.stem(x))
        y = self.depthwise(x)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(F.silu(y * gate) + x)


class Branches(nn.Module):
    """Concatenation, chunks and an average pool between convolutions, as in Inception."""

    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(4, 6, 1),
            nn.Conv2d(4, 6, 3, padding=1),
        )
        self.out = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        left, right = F.relu(self.stem(x)).chunk(2, 1)
        joined = torch.cat([self.a(left), F.relu(self.b(F.avg_pool2d(right, 3, 1, 1)))], 1)
        return self.out(joined)


class Shuffle(nn.Module):
    """Channels shuffled by hand between convolutions with a stride, as in ShuffleNet.

    Sizes are computed in the graph.
    """

    def __init__(self):
        super().__init__()
        self.stem, self.right = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        y = self.stem(x)
        batch, channels, height, width = y.size()
        y = (
            y.view(batch, 2, channels // 2, height, width)
            .transpose(1, 2)
            .reshape(batch, channels, height, width)
        )
        left, right = y.chunk(2, 1)
        return torch.cat([left, self.right(right)], 1)


class Broadcast(nn.Module):
    """An addition whose sides have different shapes: each sample's pooled features on its feature map."""

    def __init__(self):
        super().__init__()
        self.stem, self.local, self.whole = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = F.relu(self.stem(x))
        return self.head(F.relu(self.local(y) + self.whole(F.adaptive_avg_pool2d(y, 1))))


class Squeeze(nn.Module):
    """Pools of both kinds between convolutions."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x):
        x = F.relu(self.body(F.max_pool2d(F.relu(self.stem(x)), 2, 2)))
        return self.head(F.adaptive_avg_pool2d(x, 1)).flatten(1)


class PoolWithoutStride(nn.Module):
    """A max pool whose stride is the size of its window by default."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.head(F.max_pool2d(F.relu(self.stem(x)), 2))


class FeedForward(nn.Module):
    """A residual stream that starts at the model's own input."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ViewOfResidual(nn.Module):
    """A residual stream that is looked at again, through a view, after the addition."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        stream = torch.tanh(x)
        view = stream.view(-1)
        return self.fc(x) + stream, view * 2


class Encoder(nn.Module):
    """A pre-norm transformer block: attention and feed-forward with residual streams."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(32), Attention(), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PatchEncoder(nn.Module):
    """A residual stream that starts as a permuted view of a convolution's output, as in SigLIP and Whisper."""

    def __init__(self):
        super().__init__()
        self.patch, self.position = nn.Conv2d(3, 32, 2, stride=2), nn.Parameter(torch.randn(16, 32))
        self.norm1, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm2, self.mix = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        return x + self.mix(self.norm2(x))


class ChannelsLastBlock(nn.Module):
    """Linears over channels between convolutions, and a shortcut around both, as in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma, self.head = nn.Parameter(torch.rand(8, 1, 1)), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        y = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.head(self.gamma * y.permute(0, 3, 1, 2) + x)


#: Name → model, shape of its input, operators that are asked to run int8.
MODELS = {
    "mlp": (MLP, (4, 16), {"fc1", "fc2"}),
    "residual": (ResidualCNN, (2, 3, 8, 8), {"stem", "conv1", "conv2", "add", "fc"}),
    "attention": (Attention, (2, 6, 32), {"query", "key", "value", "matmul", "matmul_1", "out"}),
    "encoder": (
        Encoder,
        (2, 6, 32),
        {*(f"attention.{n}" for n in ("query", "key", "value", "matmul", "matmul_1", "out")), "up", "down"},
    ),
    "conv1d": (Conv1dNet, (2, 4, 12), {"conv1", "conv2"}),
    "conv3d": (Conv3dNet, (2, 2, 6, 6, 6), {"conv1", "conv2"}),
    "transpose": (TransposeNet, (2, 3, 8, 8), {"down", "up"}),
    "gated": (GatedCNN, (2, 3, 8, 8), {"stem", "depthwise", "squeeze", "excite", "head"}),
    "branches": (Branches, (2, 3, 8, 8), {"stem", "a", "b", "out"}),
    "squeeze": (Squeeze, (2, 3, 8, 8), {"stem", "body", "head"}),
    "pool without stride": (PoolWithoutStride, (2, 3, 8, 8), {"stem", "head"}),
    "feed-forward": (FeedForward, (2, 6, 32), {"up", "down"}),
    "view of residual": (ViewOfResidual, (2, 6, 32), {"fc"}),
    "flattened attention": (
        FlattenedAttention,
        (2, 6, 32),
        {"query", "key", "value", "matmul", "matmul_1", "out"},
    ),
    "patches": (PatchEncoder, (2, 3, 8, 8), {"patch", "up", "down", "mix"}),
    "channels last block": (ChannelsLastBlock, (2, 3, 8, 8), {"stem", "depthwise", "up", "down", "head"}),
    "broadcast": (Broadcast, (2, 3, 8, 8), {"stem", "local", "whole", "head"}),
    "shuffle": (Shuffle, (2, 3, 8, 8), {"stem", "right"}),
}


def changing_after_a_view(self, x):
    h = self.a(x)
    view = h.view(-1, 4, 4)
    h[:, :4] = 5.0
    y = self.b(view.reshape(-1, 16))
    h.add_(1)
    return y, self.b(h)


class BackendSuite:
    """Inherit, and set `backend`."""

    backend: str
    #: dB of the engine against the reference graph; healthy engines have 30 and more.
    agreement = 30.0
    #: The same between two memory layouts of one input: kernels add in another order.
    layouts = 30.0
    #: Kinds of operators that the backend has no kernel for.
    without_kernel: tuple[str, ...] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def converted(cls):
        """name → (model, quantized model), made once per class."""
        made, suite = {}, cls()

        def make(name):
            torch.manual_seed(len(name))
            build, shape, _ = MODELS[name]
            model = build().eval()
            prepared = prepared_for(model, torch.randn(shape), backend=cls.backend)
            for batch in (8, 5):
                prepared(torch.randn(batch, *shape[1:]))
            return model, suite.convert(prepared)

        def get(name):
            if name not in made:
                try:
                    made[name] = make(name)
                except Exception as error:  # every test of this model fails with it, none tries again
                    made[name] = error
            if isinstance(made[name], Exception):
                raise made[name]
            return made[name]

        return get

    def convert(self, prepared, **options):
        return convert(prepared, **options)

    def asked(self, name, report):
        """The operators that the default configuration asks int8 of.

        Those that the backend has a kernel for.
        """
        return MODELS[name][2] - {op.operator for op in report.ops if op.kind in self.without_kernel}

    def quantized(self, model, inputs, config=None):
        return quantized(model, inputs, config, self.backend)

    def agrees(self, q, *inputs):
        """The engine gives what the graph gives.

        Twice, since engines can change after their first run of a shape.
        """
        with torch.no_grad():
            expected = q.reference(*inputs)
            for _ in range(2):
                assert worst_db(expected, q(*inputs)) >= self.agreement

    @pytest.mark.parametrize("name", MODELS)
    def test_agrees_with_the_reference(self, converted, name):
        _, q = converted(name)
        self.agrees(q, torch.randn(MODELS[name][1]))

    @pytest.mark.parametrize("name", MODELS)
    def test_is_close_to_fp32(self, converted, name):
        model, q = converted(name)
        x = torch.randn(MODELS[name][1])
        assert worst_db(call(model, x), q(x)) > 20

    @pytest.mark.parametrize("name", MODELS)
    def test_other_batch_sizes(self, converted, name):
        _, q = converted(name)
        for batch in (1, 3, 7):
            self.agrees(q, torch.randn(batch, *MODELS[name][1][1:]))

    @pytest.mark.parametrize("name", MODELS)
    def test_shapes_in_turn(self, converted, name):
        """What an engine keeps of one shape must fit the others, also those that it knows already."""
        _, q = converted(name)
        for batch in (MODELS[name][1][0], 3, MODELS[name][1][0], 1, 5, 3, MODELS[name][1][0], 1):
            self.agrees(q, torch.randn(batch, *MODELS[name][1][1:]))

    @pytest.mark.parametrize("name", ["attention", "encoder", "conv1d"])
    def test_other_lengths(self, converted, name):
        _, q = converted(name)
        shape = MODELS[name][1]
        self.agrees(q, torch.randn(2, shape[1], 20) if name == "conv1d" else torch.randn(2, 11, shape[2]))

    @pytest.mark.parametrize("name", ["residual", "gated", "transpose"])
    def test_other_image_sizes(self, name):
        build, shape, _ = MODELS[name]
        auto, x = torch.export.Dim.AUTO, torch.randn(shape)
        prepared = prepared_for(
            build(), x, backend=self.backend, dynamic_shapes={"x": {0: auto, 2: auto, 3: auto}}
        )
        q = self.convert(prepared)
        for inputs in (x, torch.randn(1, 3, 16, 12)):
            self.agrees(q, inputs)

    @pytest.mark.parametrize("name", ["residual", "gated", "branches", "broadcast", "transpose"])
    def test_channels_last_inputs(self, converted, name):
        _, q = converted(name)
        x = torch.randn(MODELS[name][1])
        plain = q(x)
        assert worst_db(plain, q(x.to(memory_format=torch.channels_last))) >= self.layouts
        assert worst_db(plain, q(x)) >= self.layouts

    @pytest.mark.parametrize("name", MODELS)
    def test_inputs_that_are_not_contiguous(self, converted, name):
        _, q = converted(name)
        shape = MODELS[name][1]
        wide = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        turned = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        expanded = torch.randn(1, *shape[1:]).expand(shape)
        for x in (wide, turned, expanded):
            assert worst_db(q(x.contiguous()), q(x)) >= self.layouts
            self.agrees(q, x)

    @pytest.mark.parametrize("name", MODELS)
    def test_inputs_are_not_changed(self, converted, name):
        _, q = converted(name)
        for batch in (MODELS[name][1][0], 3):
            x = torch.randn(batch, *MODELS[name][1][1:])
            before = x.clone()
            first = q(x)
            assert torch.equal(x, before)
            assert worst_db(first, q(x)) >= self.layouts
            assert torch.equal(x, before)

    def test_gradients_are_not_asked_for(self, converted):
        _, q = converted("mlp")
        assert not q(torch.randn(2, 16, requires_grad=True)).requires_grad

    @pytest.mark.parametrize("name", ["residual", "attention"])
    def test_four_threads_with_two_shapes(self, converted, name):
        _, q = converted(name)
        shape = MODELS[name][1]
        inputs = [torch.randn(batch, *shape[1:]) for batch in (2, 3)]
        expected = [q(x) for x in inputs]
        problems = []

        def work():
            try:
                for i in range(10):
                    found = worst_db(expected[i % 2], q(inputs[i % 2]))
                    if found < self.agreement:
                        problems.append(found)
            except Exception as error:  # what a thread raises would be lost
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert problems == []
        assert not any(thread.is_alive() for thread in threads)

    @pytest.mark.parametrize("name", ["residual", "attention"])
    def test_autocast_around_a_call_changes_nothing(self, converted, name):
        _, q = converted(name)
        x = torch.randn(MODELS[name][1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, reference = q(x), q.reference(x)
        assert torch.equal(got, q(x))
        assert torch.equal(reference, q.reference(x))

    def test_autocast_around_load_changes_nothing(self, converted, tmp_path):
        _, q = converted("attention")
        q.save(tmp_path / "m")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loaded = load(tmp_path / "m", backend=self.backend)
        found = loaded.report().sqnr_db
        assert found is None or found >= self.agreement

    @pytest.mark.parametrize("name", ["residual", "gated", "attention", "patches", "channels last block"])
    def test_a_new_thread_may_begin_with_any_shape(self, converted, name):
        """Engines compile per thread; what one thread's first call leaves behind must fit the others'."""
        _, q = converted(name)
        inputs = [torch.randn(batch, *MODELS[name][1][1:]) for batch in (2, 3, 5)]
        for order in ((0, 1), (1, 0), (2, 1, 0)):
            problems = []

            def work(order=order, problems=problems):
                try:
                    for i in (*order, *order):
                        self.agrees(q, inputs[i])
                except Exception as error:  # what a thread raises would be lost
                    problems.append(error)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(timeout=120)
            assert problems == []
            for x in inputs:
                self.agrees(q, x)

    def test_masks_and_causal_attention(self):
        x, mask = torch.randn(2, 6, 32), torch.ones(2, 1, 6, 6, dtype=torch.bool)
        mask[1, :, :, 4:] = False
        q = self.quantized(Attention(), (x, mask))
        self.agrees(q, x, mask)
        q = self.quantized(Attention(is_causal=True), x)
        self.agrees(q, x)
        self.agrees(q, torch.randn(3, 9, 32))

    def test_a_mask_of_another_length(self):
        q = self.quantized(Attention(), (torch.randn(2, 6, 32), torch.zeros(2, 1, 6, 6)))
        self.agrees(q, torch.randn(3, 9, 32), torch.randn(3, 1, 9, 9))

    @pytest.mark.parametrize("dtype", ["uint8", "int8"])
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("name", ["residual", "attention"])
    def test_activation_types(self, dtype, symmetric, name):
        build, shape, _ = MODELS[name]
        x = torch.randn(shape)
        q = self.quantized(build(), x, StaticQuantConfig(act_dtype=dtype, act_sym=symmetric))
        self.agrees(q, x)

    @pytest.mark.parametrize("name", ["residual", "mlp", "transpose"])
    def test_weights_per_tensor(self, name):
        build, shape, _ = MODELS[name]
        x = torch.randn(shape)
        self.agrees(self.quantized(build(), x, StaticQuantConfig(w_granularity="per_tensor")), x)

    @pytest.mark.parametrize("padding", [2, "same"])
    def test_dilated_windows_of_values_of_both_signs(self, padding):
        """With AMX, making oneDNN's kernel of this convolution ends the process."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=padding, dilation=2), nn.ReLU()).eval()
        x = torch.randn(1, 64, 56, 56)
        self.agrees(self.quantized(model, x), x)

    def test_grouped_transposed_convolutions(self):
        x = torch.randn(2, 4, 6, 6)
        self.agrees(
            self.quantized(
                nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 4, 1)), x
            ),
            x,
        )

    @pytest.mark.parametrize(
        ("key", "floats", "asked"),
        [
            ("conv1", {"conv1"}, {"stem", "conv2", "add", "fc"}),
            (r"conv\d", {"conv1", "conv2"}, {"stem", "fc"}),  # no int8 convolution stands in front of the sum
            (nn.Linear, {"fc"}, {"stem", "conv1", "conv2"}),  # nothing in int8 reads the sum any more
            ("add", {"add"}, {"stem", "conv1", "conv2", "fc"}),
            (".*", {"stem", "conv1", "conv2", "add", "fc"}, set()),
        ],
    )
    def test_fallback_rules_leave_operators_in_fp32(self, key, floats, asked):
        model, x = ResidualCNN(), torch.randn(2, 3, 8, 8)
        q = self.quantized(model, x, StaticQuantConfig().set_local(key, FP32))
        report = {op.operator: op for op in q.report().ops}
        assert {name for name, op in report.items() if op.asked == "int8"} == asked
        for name in floats:
            assert (report[name].ran, report[name].reason) == ("fp32", "fp32 was asked for")
        self.agrees(q, x)
        if not asked:
            assert worst_db(call(model, x), q(x)) > 90

    @pytest.mark.parametrize("name", MODELS)
    def test_report(self, converted, name):
        model, q = converted(name)
        report = q.report()
        assert report.backend == self.backend
        assert {op.operator for op in report.ops if op.asked == "int8"} == self.asked(name, report)
        assert [op.operator for op in report.ops] == [d.operator for d in q.graph.plan.decisions]
        for op in report.ops:
            assert op.ran in ("int8", "fp32")
            assert op.kind
            assert op.rule == ("global" if op.asked == "int8" or "fused in fp32" in op.reason else op.rule)
            assert op.reason or op.ran == "int8", op
        assert report.asked_int8 == len(self.asked(name, report))
        assert report.ran_int8 + len(report.not_int8) == report.asked_int8
        parameters = sum(p.numel() for n, p in model.named_parameters() if ".bn" not in f".{n}")
        assert parameters * 4 <= report.float_bytes <= parameters * 4 + 4096
        assert report.weight_bytes > 0
        assert report.sqnr_vs_fp32_db > 20
        assert report.to_dict()["ops"][0]["operator"] == report.ops[0].operator
        text = report.text(details=True)
        assert all(op.operator in text for op in report.ops)
        assert f"{report.ran_int8} of {report.asked_int8}" in text

    def test_report_from_another_thread(self, converted):
        _, q = converted("residual")
        here, there = q.report(), []
        thread = threading.Thread(target=lambda: there.append(q.report()))
        thread.start()
        thread.join(timeout=120)
        assert there == [here]

    def test_outputs_keep_their_structure(self):
        def forward(self, x):
            y = self.fc(x)
            return {"y": y, "more": (F.relu(y), [x, None]), "n": 3}

        model, x = Function(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4)
        out = self.quantized(model, x)(x)
        assert list(out) == ["y", "more", "n"]
        assert torch.equal(out["more"][0], F.relu(out["y"]))
        assert torch.equal(out["more"][1][0], x)
        assert out["more"][1][1] is None
        assert out["n"] == 3

    def test_values_that_change_after_a_view_was_taken(self):
        x = torch.randn(4, 16)
        q = quantized(
            Function(changing_after_a_view, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval(),
            x,
            None,
            self.backend,
        )
        assert worst_db(q.reference(x), q(x)) > 60

    def test_converting_twice_gives_the_same(self):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, 8)
        prepared = prepared_for(ResidualCNN(), x, backend=self.backend)
        first, second = self.convert(prepared), self.convert(prepared)
        assert torch.equal(first(x), second(x))
        reports = [
            {k: v for k, v in q.report().to_dict().items() if k != "verdict"} for q in (first, second)
        ]  # that one is measured
        assert reports[0] == reports[1]

    def test_two_models_in_two_threads(self):
        """prepare, calibrate and convert at the same time do not disturb each other."""
        results = {}

        def work(name):
            build, shape, _ = MODELS[name]
            x = torch.randn(shape)
            try:
                results[name] = self.quantized(build(), x), x
            except Exception:  # what a thread raises would be lost
                results[name] = traceback.format_exc()

        threads = [threading.Thread(target=work, args=(name,)) for name in ("mlp", "residual", "conv1d")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        # compared here: while another thread exports, torch has oneDNN switched off for the whole process,
        # and fp32 sums differ
        assert len(results) == 3
        for result in results.values():
            assert isinstance(result, tuple), result
            self.agrees(*result)
