"""Recurrent layers with a range for each row of each step → calls of an operator.

That operator computes them in C (`nc/kernels/c_code/recurrent.c`). What the operator reads is packed when the
graph is lowered. The lowered graph is never stored: artefacts hold the graph before lowering.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.nn.functional import pad

from nc.backends.dynamic import DYNAMIC_KERNEL
from nc.backends.native.fuse import weight_of
from nc.graph.fx_utils import call_function, constant_of, free_name, take_over
from nc.graph.views import Dequantize, Recurrent
from nc.kernels import cpu
from nc.kernels.c_code import abi, openmp
from nc.kernels.c_code.build import load_on_threads
from nc.kernels.c_code.calls import Function, call_packed, function_of
from nc.kernels.c_code.isas import ISAS, NUMBERS, compiled
from nc.numerics.recurrent import weights_of_layers
from nc.ops import RECURRENT
from nc.process.unavailable import Unavailable

#: Outputs of a panel, and inputs of a word.
_PANEL, _WORD = abi.CONSTANTS.panel, abi.CONSTANTS.word
#: More inputs could make sums of products that int32 does not hold.
_MOST_INPUTS = abi.CONSTANTS.most_inputs
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
NAMESPACE = "nc_recurrent"
_NAMES = {operator: name for name, operator in RECURRENT.items()}
NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
#: Codes in panels, scale and sum of codes of each output, and the bias. A matrix in fp32 has its panels in
#: the place of codes, and neither scale nor sums.
Matrix = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """The function in C, and the instruction sets that it was compiled for."""

    function: Function
    isas: tuple[str, ...]

    def isa(self) -> str:
        """Return the best instruction set that this CPU has; "" for none."""
        return next(
            (
                name
                for name in ("avx512_vnni", "avx2")
                if name in self.isas and not cpu.code_lacks(ISAS[name])
            ),
            "",
        )


@functools.cache
def _code() -> Code | Unavailable:
    """Return the code, or why there is none."""
    library = load_on_threads("recurrent")
    if isinstance(library, Unavailable):
        return library
    return Code(function_of(library, "recurrent"), compiled(library))


def why_unavailable() -> str:
    """Why the C code can't be used here; "" when it can."""
    code = _code()
    if isinstance(code, Unavailable):
        return f"its C code can't be loaded: {code}"
    return "" if code.isa() else "its C code has no form for this CPU"


def replace_recurrent(module: fx.GraphModule) -> None:
    """Let the C code compute the layers whose rows have separate ranges."""
    if why_unavailable():
        return
    layouts = _Layouts(module)
    for node in [n for n in module.graph.nodes if _is_ours(n) and not why_not_recurrent(n)]:
        layer, name = Recurrent.of(node), _NAMES[node.target]
        layers = layer.num_layers * (1 + layer.bidirectional)
        with module.graph.inserting_before(node):
            packed = list(layouts.of(layer, layers))
            hx = [layer.hx] if isinstance(layer.hx, fx.Node) else list(layer.hx)
            features = _shape(module, layer.params[0])[1]
            hidden = _shape(module, layer.params[1])[0] // _GATES[name]
            options = (layer.num_layers, layer.bidirectional, layer.batch_first, features, hidden)
            new = call_function(
                module.graph,
                recurrent_layers(),
                (layer.input, hx, packed, f"{name}_relu" if layer.relu else name, *options),
            )
        take_over(new, node)
        new.meta[DYNAMIC_KERNEL] = True
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)


def _shape(module: fx.GraphModule, weight: fx.Node) -> tuple[int, ...]:
    """Shape of a matrix, of its constant: what nodes note comes from a file that may be changed."""
    constant = weight if weight.op == "get_attr" else Dequantize.of(weight).codes
    return tuple(constant_of(module, constant).shape)


def why_not_recurrent(node: fx.Node) -> str:
    """Why `replace_recurrent` leaves a layer alone; "" for other nodes."""
    if not _is_ours(node):
        return ""
    if why := why_unavailable():
        return why
    largest = max(w.meta["val"].shape[1] for w in Recurrent.of(node).params if w.meta["val"].dim() == 2)
    return f"its C code takes {_MOST_INPUTS} inputs at most" if largest > _MOST_INPUTS else ""


def _is_ours(node: fx.Node) -> bool:
    return node.target in _NAMES and Recurrent.of(node).per_token


class _Layouts:
    """Constants with what is packed; cells that are called in several steps share these."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._names: dict[object, list[str]] = {}

    def of(self, layer: Recurrent, layers: int) -> Iterator[fx.Node | None]:
        """For each layer and direction the parts of three matrices; None for those that it has not."""
        for w_ih, w_hh, b_ih, b_hh, w_hr in weights_of_layers(layer.params, layer.has_biases, layers):
            for weight, bias in ((w_ih, b_ih), (w_hh, b_hh), (w_hr, None)):
                yield from self._parts(weight)
                yield None if bias is None else self._module.graph.get_attr(str(bias.target))

    def _parts(self, weight: fx.Node | None) -> Iterator[fx.Node | None]:
        names = [] if weight is None else self._names_of(weight)
        yield from (*map(self._module.graph.get_attr, names), *[None] * (3 - len(names)))

    def _names_of(self, weight: fx.Node) -> list[str]:
        if weight.op == "get_attr":
            if weight.target not in self._names:
                self._names[weight.target] = [self._constant(pack_float(constant_of(self._module, weight)))]
            return self._names[weight.target]
        codes, scale = Dequantize.of(weight).codes, Dequantize.of(weight).scale
        key = codes.target, scale.target if isinstance(scale, fx.Node) else scale
        if key not in self._names:
            self._names[key] = [self._constant(part) for part in pack(*weight_of(self._module, weight))]
        return self._names[key]

    def _constant(self, value: torch.Tensor) -> str:
        name = free_name(self._module, "recurrent_layout")
        self._module.register_buffer(name, value)
        return name


def pack(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in the panels that the C code reads, fp32 scales, and int32 sums of codes.

    Args:
        codes: int8, shape [outputs, inputs], without -128.
        scale: fp32, one for each output.
    """
    outputs, inputs = codes.shape
    padded = pad(codes, (0, -inputs % _WORD, 0, -outputs % _PANEL))
    panels = padded.view(-1, _PANEL, padded.shape[1] // _WORD, _WORD).transpose(1, 2).contiguous()
    return panels, scale, codes.sum(1, dtype=torch.int32)


def pack_float(weight: torch.Tensor) -> torch.Tensor:
    """Return a fp32 matrix [outputs, inputs] in the panels that the C code reads."""
    padded = pad(weight.detach(), (0, 0, 0, -weight.shape[0] % _PANEL))
    return padded.view(-1, _PANEL, weight.shape[1]).transpose(1, 2).contiguous()


@functools.cache
def recurrent_layers() -> torch._ops.OpOverload:
    """Return what a lowered graph calls; registered when it is needed first."""
    library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call] # torch annotates it in part only
    options = "str kind, int num_layers, bool bidirectional, bool batch_first, int features, int hidden"
    library.define(f"layers(Tensor x, Tensor[] hx, Tensor?[] packed, {options}) -> Tensor[]")  # type: ignore[no-untyped-call] # as above
    library.impl("layers", layers, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(f"{NAMESPACE}::layers", _results, lib=library)
    _LIBRARIES.append(library)
    found: torch._ops.OpOverload = torch.ops.nc_recurrent.layers.default
    return found


#: torch forgets the operators of a library that nothing holds.
_LIBRARIES: list[torch.library.Library] = []


def _results(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    packed: Sequence[torch.Tensor | None],  # names and order of the schema
    kind: str,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    features: int,
    hidden: int,
) -> list[torch.Tensor]:
    """Return what `layers` gives, without values."""
    first, second = x.shape[:2]
    elements = (1 + bidirectional) * hx[0].shape[-1]
    output = x.new_empty((second, first, elements) if batch_first else (first, second, elements))
    return [
        output.transpose(0, 1) if batch_first else output,
        *(torch.empty_like(h, memory_format=torch.contiguous_format) for h in hx),
    ]


def layers(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    packed: Sequence[torch.Tensor | None],
    kind: str,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    features: int,
    hidden: int,
) -> list[torch.Tensor]:
    """Output and last states, as `nc.numerics.recurrent` computes them with `per_token`.

    Args:
        x: fp32, shape [steps, rows, features], or with `batch_first` [rows, steps, features].
        hx: the first states, each of shape [layers and directions, rows, elements].
        packed: for each layer and direction codes, scale, sums and bias of the matrices of input, state and
            projection. The first matrices of the input may be fp32, and have neither scale nor sums.
        kind: "lstm", "gru", "rnn" or "rnn_relu".
        num_layers: consecutive layers.
        bidirectional: a second direction reads the steps backwards.
        batch_first: rows are the first dimension of `x` and of the output.
        features: of `x`, as the weights need them.
        hidden: elements of a cell state.

    Raises:
        ValueError: sizes that the weights do not fit, or a dtype other than fp32.
        BackendError: there is no memory.
    """
    directions = 1 + bidirectional
    matrices = matrices_of(packed)
    state = state_of(matrices, hidden)
    check(x, hx, num_layers * directions, features, (state, hidden), batch_first=batch_first)
    steps = x.transpose(0, 1) if batch_first else x
    last = [h.clone(memory_format=torch.contiguous_format) for h in hx]
    for layer in range(num_layers):
        output = x.new_empty((*steps.shape[:2], directions * state))
        for direction in range(directions):
            index = layer * directions + direction
            part = output[..., direction * state :]
            _direction(
                steps,
                part,
                [h[index] for h in last],
                matrices[index],
                kind,
                reverse=direction == 1,
                hidden=hidden,
            )
        steps = output
    return [steps.transpose(0, 1) if batch_first else steps, *last]


def check(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    directions: int,
    features: int,
    elements: Sequence[int],
    *,
    batch_first: bool,
) -> None:
    """Raise ValueError for an input or states that layers can't take; `elements` are those of both states."""
    rows = x.shape[0 if batch_first else 1] if x.dim() == 3 else 0
    expected = [(directions, rows, size) for size in elements][: len(hx)]
    fit = x.dim() == 3 and x.shape[-1] == features and [tuple(h.shape) for h in hx] == expected
    if not fit or any(t.dtype != torch.float32 for t in (x, *hx)):
        given = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (x, *hx))
        msg = f"a recurrent layer of {features} features and states {expected} in fp32 can't take {given}"
        raise ValueError(msg)
    if not x.shape[1 if batch_first else 0]:
        msg = "a recurrent layer needs at least one step"
        raise ValueError(msg)


def matrices_of(packed: Sequence[torch.Tensor | None]) -> list[list[Matrix]]:
    """For each layer and direction those of input and state, and the projection if there is one."""
    found: list[list[Matrix]] = []
    for i in range(0, len(packed), 4):
        codes, scale, sums, bias = packed[i : i + 4]
        if i % 12 == 0:
            found.append([])
        if codes is not None:
            found[-1].append((codes, scale, sums, bias))
    return found


def state_of(matrices: Sequence[Sequence[Matrix]], hidden: int) -> int:
    """Elements of a state: of the projection if there is one."""
    of_projection = matrices[0][2][1] if len(matrices[0]) > 2 else None
    return hidden if of_projection is None else of_projection.shape[0]


def gates_of(kind: str, hidden: int) -> int:
    """How many numbers all gates of a cell have."""
    return _GATES[kind.partition("_")[0]] * hidden


def _direction(
    x: torch.Tensor,
    y: torch.Tensor,
    states: list[torch.Tensor],
    matrices: list[Matrix],
    kind: str,
    *,
    reverse: bool,
    hidden: int,
) -> None:
    """All steps of one direction of one layer.

    It writes outputs to `y` and the last states over the first ones.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    gates = x.new_empty((x.shape[0] * x.shape[1], gates_of(kind, hidden)))
    sizes = {"hidden": hidden, "threads": openmp.threads()}
    fields = fields_of(x, y, states[0].shape[-1], matrices, kind, reverse=reverse, **sizes)
    cells = states[1] if len(states) > 1 else NOTHING
    function = available().function
    call_packed(function, _packed(function, **fields), [y, x, states[0], cells, gates, *in_order(matrices)])


def in_order(matrices: Sequence[Matrix]) -> list[torch.Tensor]:
    """Return the parts of matrices as the function in C takes them."""
    parts = [NOTHING if part is None else part for matrix in matrices for part in matrix]
    return parts + [NOTHING] * (12 - len(parts))


def available() -> Code:
    """Return the code, where layers were replaced for it."""
    code = _code()
    assert not isinstance(code, Unavailable), "layers are replaced only where there is code"
    return code


def fields_of(
    x: torch.Tensor,
    y: torch.Tensor,
    state: int,
    matrices: Sequence[Matrix],
    kind: str,
    *,
    reverse: bool,
    hidden: int,
    threads: int,
) -> dict[str, int]:
    """Return the first argument of the function in C, for one direction of one layer.

    Raises:
        ValueError: a matrix does not fit.
    """
    steps, rows, features = x.shape
    gates = gates_of(kind, hidden)
    sizes = [(gates, features), (gates, state), (state, hidden)]
    for (codes, scale, *_), (outputs, inputs) in zip(matrices, sizes, strict=False):
        held = inputs if scale is None else -(-inputs // _WORD)
        if codes.shape[:2] != (-(-outputs // _PANEL), held) or (scale is not None and len(scale) != outputs):
            wanted = f"{hidden} hidden elements, states of {state} and {features} features"
            msg = f"a matrix of a recurrent layer does not fit {wanted}: its panels are {tuple(codes.shape)}"
            raise ValueError(msg)
    return {
        "cell": abi.CELL.number(kind),
        "isa": NUMBERS[available().isa()],
        "threads": threads,
        "reverse": reverse,
        "float_input": matrices[0][1] is None,
        "steps": steps,
        "rows": rows,
        "features": features,
        "hidden": hidden,
        "state": state,
        "x_step": x.stride(0),
        "x_row": x.stride(1),
        "y_step": y.stride(0),
        "y_row": y.stride(1),
    }


@functools.lru_cache(maxsize=1024)
def _packed(function: Function, **fields: int) -> bytes:
    """Return the first argument; making it takes as long as the call for one step of a cell."""
    return function.packed(fields)
