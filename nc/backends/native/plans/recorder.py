"""Make a plan by going through a lowered graph once.

Every node becomes a primitive, a view, a constant, or a call of its ATen operator.

ATen operators are called at once on the inputs of this call, so sizes and strides are those of real tensors.
Primitives are called only if an ATen operator reads their results: most plans have no ATen operator after the
first product.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from nc.backends.native.plans.arena import aligned, solve
from nc.backends.native.plans.execution_plan import (
    AtenCall,
    Block,
    Constant,
    Entry,
    ExecutionPlan,
    FunctionCall,
    MemoryPart,
    PrimitiveCall,
    Ref,
    Refusal,
    Slot,
    Watched,
    references,
)
from nc.backends.native.plans.operands import (
    Later,
    PackedWeights,
    PlanTensor,
    WeightToPack,
    alias,
    by_name,
    is_about_sizes,
    is_gather,
    is_view,
    operator_name,
    reads_blocks,
    reads_inputs,
    tensors,
)
from nc.backends.native.plans.ways import PlannedOperator, Refused
from nc.backends.native.qdq_rewrites import CONVERTERS
from nc.errors import BackendError
from nc.graph.catalogue import climb, first_input, may_be_view, works_in_place
from nc.graph.fx_utils import GIVES
from nc.graph.schemas import writes_into
from nc.graph.views import called_with, returned
from nc.kernels.c_code import openmp
from nc.kernels.c_code.abi import Value
from nc.kernels.c_code.calls import Function, call_packed
from nc.kernels.onednn import trials
from nc.kernels.onednn.api import Unimplemented
from nc.kernels.onednn.call_lists import Scratch, packed, run_once
from nc.kernels.onednn.descriptions import DST, MULTIPLE_SRC, SCRATCHPAD, SRC, SRC_1, WEIGHTS, Desc
from nc.kernels.onednn.primitives import Layout, Maker, Primitive
from nc.profiling.nodes import describe
from nc.profiling.onednn_verbose import ExecutedPrimitive
from nc.profiling.profile import EngineCall

#: A tensor's data decides about a size or a number: another call of the same sizes may need another plan.
_UNPLANNABLE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
#: Bytes that calls which wait may keep from being free.
_MOST_HELD = 2**29
#: Why a way refuses what is not a tensor of the plan, or one that it needs when the plan is made.
_NO_TENSOR = "one of its arguments is not a tensor"
_NO_CONSTANT = "one of its arguments is computed from the inputs"
_SHORT = {
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int16: "s16",
    torch.int32: "s32",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    """How far a recording is.

    Attributes:
        entries, blocks, begins, waiting, results: how many there are.
        held: bytes that calls which wait keep.
        times_made: how often calls that waited were made.
        weights: see `PackedWeights.made`.
    """

    entries: int
    blocks: int
    begins: int
    waiting: int
    results: int
    held: int
    times_made: int
    weights: int


class Recorder:
    """Makes one plan.

    Args:
        module: lowered graph, with weights as they are.
        maker: of the oneDNN library.
        weights: those packed already.
        operators: what is known of operators, by target.
        follow: what is computed from constants of the module alone is computed in each call, so that changes
            of them are seen.
        threads: those that functions in C divide their work among; None: as many as torch uses.
        any_rows: the plan is one of those that a family is made of, for any number of rows.
        only_c: functions in C compute all that they can, also what something else computes faster.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        maker: Maker,
        weights: PackedWeights,
        operators: Mapping[Any, PlannedOperator],
        follow: bool = False,
        threads: int | None = None,
        any_rows: bool = False,
        only_c: bool = False,
    ) -> None:
        self.threads = openmp.threads() if threads is None else threads
        self.module, self.maker, self.weights, self.follow = module, maker.keeping(), weights, follow
        self.operators, self.any_rows, self.only_c = operators, any_rows, only_c
        self._entries: list[Entry] = []
        self._blocks: list[Block] = []
        #: For each slot, the bytes before its tensor.
        self._begins: list[int] = []
        self._env: dict[fx.Node, Any] = {}
        #: Calls that were recorded, but not made yet.
        self._waiting: list[Callable[[], object]] = []
        self._held = 0
        self._times_made = 0
        self._scratch = Scratch()
        #: Whether oneDNN's plain C++ is taken where it has nothing better.
        self._takes_reference = False
        #: For each operator, kernels whose sums are wrong.
        self._wrong: dict[str, tuple[str, ...]] = {}
        self._refusals: list[Refusal] = []
        self._restored: fx.GraphModule | None = None
        #: Nodes that are computed in each call, even if they read no input.
        self._each_time: set[fx.Node] = set()
        #: Results of nodes, with the number of entries that compute them.
        self._results: list[tuple[fx.Node, Any, int]] = []

    def record(self, inputs: Sequence[torch.Tensor]) -> ExecutionPlan:
        """Return the plan for inputs of these sizes.

        Raises:
            BackendError: the graph can't be planned.
        """
        given = [PlanTensor(tensor, self._slot(tensor)) for tensor in inputs]
        remaining = iter(given)
        last_reader = {source: node for node in self.module.graph.nodes for source in node.all_input_nodes}
        ends: dict[fx.Node, list[fx.Node]] = {}
        for source, node in last_reader.items():
            ends.setdefault(node, []).append(source)
        self._each_time = {_changed(node) for node in self.module.graph.nodes if works_in_place(node)}
        for node in self.module.graph.nodes if self.follow else ():
            if any(source.op == "get_attr" or source in self._each_time for source in node.all_input_nodes):
                self._each_time.add(node)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = next(remaining)
            elif node.op == "get_attr":
                self._env[node] = self._attribute(str(node.target))
            elif node.op == "call_function":
                self._env[node] = self._evaluate(node)
            for source in ends.get(node, ()) if node.op != "output" else ():
                del self._env[source]  # its memory is free for the next
        outputs = [self._output(value) for value in self._arguments(returned(self.module))]
        self._waiting.clear()  # they refer to this, and to all that was computed
        return self._plan([value.root for value in given], outputs)

    def watched(self) -> list[Watched]:
        """Return the results that are values of the graph before it was lowered."""
        found = [
            (node.meta.get(GIVES, ()), value, behind)
            for node, value, behind in self._results
            if isinstance(value, PlanTensor)
        ]
        return [Watched(names, behind, self._place(value)) for names, value, behind in found if names]

    def _place(self, value: PlanTensor) -> Ref:
        """Return where a tensor is in memory; unlike `_ref`, do not keep that memory."""
        return (
            Constant(value.tensor)
            if value.root is None
            else MemoryPart(value.root, self._offset(value), value.desc)
        )

    def optional(self, value: Any) -> PlanTensor | None:
        """Return a tensor argument of a way, computed if it waits; None where there is none."""
        if isinstance(value, Later):
            value = self._now(value.node, value.args, value.kwargs)
        return value if isinstance(value, PlanTensor) else None

    def read(self, value: Any) -> PlanTensor:
        """Return a tensor argument of a way, computed if it waits.

        Raises:
            Refused: it is none.
        """
        found = self.optional(value)
        if found is None:
            raise Refused(_NO_TENSOR)
        return found

    def constant(self, value: Any) -> torch.Tensor:
        """Return the tensor of a constant argument.

        Raises:
            Refused: it is computed from the inputs, or no tensor.
        """
        found = self.read(value)
        if found.root is not None:
            raise Refused(_NO_CONSTANT)
        return found.tensor

    def optional_constant(self, value: Any) -> torch.Tensor | None:
        """Return the tensor of a constant argument; None where the argument is None.

        Raises:
            Refused: see `constant`.
        """
        return None if value is None else self.constant(value)

    def first_possible(self, ways: Mapping[str, Callable[[], T]]) -> T:
        """Return what the first way gives that does not refuse. Nothing is left of those before it.

        Raises:
            Refused: all of them do; says why, way by way.
        """
        why: list[str] = []
        for name, way in ways.items():
            before = self._state()
            try:
                return way()
            except (Refused, Unimplemented) as error:
                why.append(f"{name}: {error}")
            self._restore(before)
        raise Refused("; ".join(why))

    def _state(self) -> _State:
        counts = (
            len(self._entries),
            len(self._blocks),
            len(self._begins),
            len(self._waiting),
            len(self._results),
        )
        return _State(*counts, self._held, self._times_made, self.weights.made())

    def _restore(self, state: _State) -> None:
        """Give up what was recorded since this state. Calls that were made stay made."""
        del self._entries[state.entries :]
        del self._blocks[state.blocks :]
        del self._begins[state.begins :]
        del self._results[state.results :]
        if self._times_made == state.times_made:
            del self._waiting[state.waiting :]
            self._held = state.held
        else:  # those that waited then are made, so all that wait were recorded since
            self._waiting.clear()
            self._held = 0
        self.weights.give_up(state.weights)

    def expanded(self, x: PlanTensor, sizes: Sequence[int], node: fx.Node) -> PlanTensor:
        """Return a tensor repeated to these sizes, by torch."""
        self._make_calls(x)
        tensor = x.tensor.expand(tuple(sizes)).contiguous()
        if x.root is None:
            return PlanTensor(tensor, None)
        slot = self._slot(tensor)
        arguments = self._refs(x), list(sizes)
        self._entries.append(
            AtenCall(
                torch.ops.aten.expand_copy.default,
                arguments,
                {},
                (slot.index,),
                EngineCall(name="aten::expand_copy"),
            )
        )
        return PlanTensor(tensor, slot)

    def new(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> PlanTensor:
        """Memory for a result."""
        tensor = torch.empty_strided(tuple(sizes), tuple(strides), dtype=dtype, device="cpu")
        block = self._block(tensor)
        self._held += block.size
        return PlanTensor(tensor, block)

    def _block(self, tensor: torch.Tensor) -> Block:
        """Memory like a tensor's, which the next entry writes."""
        block = Block(tensor.untyped_storage().nbytes(), len(self._entries))
        self._blocks.append(block)
        return block

    def call(
        self,
        primitive: Primitive,
        tensors: Mapping[int, PlanTensor | torch.Tensor | tuple[Layout, torch.Tensor]],
        node: fx.Node,
    ) -> None:
        """Append a call, to be made when its result is read.

        Raises:
            Unimplemented: oneDNN has only a reference kernel, which ATen's own operator is faster than,
                unless that is the same kernel.
        """
        if primitive.is_reference and not self._takes_reference:
            msg = f"oneDNN has only the kernel {primitive.kernel!r} for {node.name}"
            raise Unimplemented(msg)
        arguments: dict[int, tuple[Layout, Ref]] = {}
        now: dict[int, torch.Tensor] = {}
        for key, value in tensors.items():
            if isinstance(value, PlanTensor):
                now[key] = value.tensor
                arguments[key] = (
                    primitive.layouts.get(key) or self.maker.layout(value.desc),
                    self._ref(value),
                )
            elif isinstance(value, tuple):
                now[key] = value[1]
                arguments[key] = (value[0], Constant(value[1]))
            else:
                now[key] = value
                arguments[key] = (
                    primitive.layouts.get(key) or self.maker.layout(Desc.of(value)),
                    Constant(value),
                )
        self._wait(lambda: run_once(self.maker, primitive, now))
        self._entries.append(PrimitiveCall(primitive, arguments, self._described(node, primitive)))

    def call_function(
        self,
        function: Function,
        fields: Mapping[str, Value],
        tensors: Sequence[PlanTensor | torch.Tensor],
        node: fx.Node,
        factors: int = 1,
        also: Sequence[fx.Node] = (),
        first: int = 0,
        shown: Mapping[str, Value] | None = None,
    ) -> None:
        """Append a call of a function in C, to be made when its result, the first of the tensors, is read.

        Args:
            function: what is called.
            fields: those of its row in `abi.FUNCTIONS`.
            tensors: what it writes, then what it reads.
            node: what it is for.
            factors: how many of the tensors that it reads a profile names.
            also: other nodes that it computes.
            first: position of the first of these, counted after the first result.
            shown: fields that are others where results that nothing reads are kept.
        """
        now = [value.tensor if isinstance(value, PlanTensor) else value for value in tensors]
        references = [
            self._ref(value) if isinstance(value, PlanTensor) else Constant(value) for value in tensors
        ]
        packed = function.packed(fields)
        self._wait(lambda: call_packed(function, packed, now))
        written, *reads = (_SHORT.get(tensor.dtype, "") for tensor in now)
        named = tuple(reads[first : first + factors])
        kernel = ExecutedPrimitive("function", f"c:{function.name}", named, written, 0.0)
        operators = dict.fromkeys(name for n in (node, *also) for name in describe(n, CONVERTERS).operators)
        step = dataclasses.replace(describe(node, CONVERTERS), operators=tuple(operators), kernels=(kernel,))
        kept = None if shown is None else function.packed({**fields, **shown})
        self._entries.append(FunctionCall(function, packed, references, step, kept))

    def pass_over(self, node: fx.Node, kernel: str, why: str) -> None:
        """Note for reports why a kernel does not compute a node that is for it, and another one does."""
        self._refusals.append(Refusal(operator_name(node), why, kernel))

    def last_refusal(self) -> str:
        """Return why a kernel was passed over last, for messages; "" where none was."""
        last = next((each for each in reversed(self._refusals) if each.kernel), None)
        return "" if last is None else f": {last.kernel} refuses, {last.why}"

    def convolution(self, wanted: trials.Convolution, weights: Desc | Layout, node: fx.Node) -> Primitive:
        """Return a primitive whose sums are right; the plan names the kernels whose sums are not."""
        primitive, wrong = trials.convolution(self.maker, wanted, weights)
        if wrong:
            self._wrong[operator_name(node)] = wrong
        return primitive

    def packed(
        self, make: Callable[[Desc | Layout], Primitive], weight: WeightToPack, desc: Desc
    ) -> tuple[Primitive, tuple[Layout, torch.Tensor]]:
        """Return a primitive with a constant weight, and the weight in its layout.

        A layout that exists already is taken where a kernel takes it, so that plans share weights.

        Args:
            make: makes the primitive for a weight's layout; for a `Desc` it chooses one.
            weight: its codes.
            desc: how the primitive is to read it.
        """
        for layout, bytes_ in self.weights.known(weight, desc):
            try:
                primitive = make(layout)
            except BackendError:
                continue
            if not primitive.is_reference or self._takes_reference:
                return primitive, (layout, bytes_)
        primitive = make(desc)
        layout = primitive.layouts[WEIGHTS]
        bytes_ = packed(self.maker, self.in_memory(weight), desc, layout, self._scratch)
        self.weights.add(weight, desc, layout, bytes_)
        return primitive, (layout, bytes_)

    def in_memory(self, weight: WeightToPack) -> torch.Tensor:
        """Return the codes of a weight, made again where their memory was given back."""
        if not weight.tensor.is_meta:
            return weight.tensor
        if self._restored is None:
            assert self.weights.again is not None
            self._restored = self.weights.again()
        tensor: torch.Tensor = getattr(self._restored, weight.name)
        return tensor.contiguous()

    def _evaluate(self, node: fx.Node) -> Any:
        args, kwargs = called_with(node)
        args, kwargs = (
            tuple(self._arguments(args)),
            {key: self._arguments(value) for key, value in kwargs.items()},
        )
        if node.target is operator.getitem and isinstance(args[0], list):
            self._results.append((node, args[0][args[1]], len(self._entries)))
            return args[0][args[1]]
        operator_ = self.operators.get(node.target)
        if operator_ is not None and operator_.waits is not None and operator_.waits(node):
            return Later(node, args, kwargs)
        return self._now(node, args, kwargs)

    def _now(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a node, noted for `watched`."""
        result = self._computed_by(node, args, kwargs)
        self._results.append((node, result, len(self._entries)))
        return result

    def _computed_by(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a node: of a primitive, or of the node's operator."""
        known = self.operators.get(node.target)
        if known is None or not known.ways or not (node in self._each_time or reads_inputs((args, kwargs))):
            return self._aten(node, args, kwargs)
        named = by_name(node, args, kwargs)
        ways = {name: functools.partial(way, self, node, named) for name, way in known.ways.items()}
        try:
            return self.first_possible(ways)
        except Refused as refused:
            why = str(refused)
        if known.plain or _is_of_onednn(node.target):
            return self._with_reference_kernels(node, ways)
        args, kwargs = self._computed(args), {key: self._computed(value) for key, value in kwargs.items()}
        count = len(self._entries)  # after those of arguments that waited
        result = self._aten(node, args, kwargs)
        if any(isinstance(entry, AtenCall) for entry in self._entries[count:]):  # a view costs nothing
            self._refusals.append(Refusal(operator_name(node), why))
        return result

    def _with_reference_kernels(self, node: fx.Node, ways: Mapping[str, Callable[[], T]]) -> T:
        """Return the result of an operator that torch can't compute, or must not because it is oneDNN's.

        oneDNN's operators may add in place, which their schema does not say.

        Raises:
            BackendError: no kernel is possible.
        """
        self._takes_reference = True
        try:
            return self.first_possible(ways)
        except Refused as refused:
            msg = f"there is no primitive for {node.name} ({node.target}) here: {refused}"
            if self.only_c:
                msg = f"no function in C computes {operator_name(node)}: {refused}"
            raise BackendError(msg) from None
        finally:
            self._takes_reference = False

    def _arguments(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._env[value]
        if isinstance(value, (list, tuple)):
            return [self._arguments(v) for v in value]
        return value

    def _attribute(self, name: str) -> Any:
        value = getattr(self.module, name)
        return PlanTensor(value, None) if isinstance(value, torch.Tensor) else value

    def _aten(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the operator itself, now and, unless the result is constant or a view, in each call."""
        args, kwargs = self._computed(args), {key: self._computed(value) for key, value in kwargs.items()}
        target: Any = node.target
        if _is_of_onednn(target):
            msg = f"there is no primitive for {node.name} ({target}) here"
            raise BackendError(msg)
        if _depends_on_values(target) and not is_gather(target, args):
            msg = f"the result of {node.name} depends on values in a way that a plan can't follow"
            raise BackendError(msg)
        result = self._called_now(target, args, kwargs)
        is_list = isinstance(result, (list, tuple))
        found = [r for r in (result if is_list else [result]) if isinstance(r, torch.Tensor)]
        if not found:
            if is_list or (reads_inputs((args, kwargs)) and not is_about_sizes(target)):
                msg = f"{node.name} reads a value of a tensor, which a plan can't follow"
                raise BackendError(msg)
            return result
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return self._changed_in_place(node, args, kwargs, found[0])
        if is_list and len(found) < len(result):
            self._unknown(node)
        made = self._traced(node, args, kwargs, found)
        return made if is_list else made[0]

    def _called_now(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator of torch's.

        Calls that wait are made where it reads what they write.
        """
        may_view = isinstance(target, torch._ops.OpOverload) and target.is_view
        if not may_view:
            self._make_calls((args, kwargs))
        result = target(*tensors(args), **{key: tensors(value) for key, value in kwargs.items()})
        if may_view and self._waiting and not is_view(result, (args, kwargs)):
            self._make_calls((args, kwargs))
            result = target(*tensors(args), **{key: tensors(value) for key, value in kwargs.items()})
        return result

    def _changed_in_place(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: torch.Tensor
    ) -> PlanTensor:
        """Append a call of an operator that changes its first argument."""
        if isinstance(args[0], PlanTensor) and args[0].root is None:
            msg = f"{node.name} changes a constant, which the next call would find changed"
            raise BackendError(msg)
        self._append(node, args, kwargs, ())
        return alias(result, (args, kwargs)) or self._unknown(node)

    def _traced(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Sequence[torch.Tensor]
    ) -> Sequence[PlanTensor]:
        """Return an operator's results as constants, views of its arguments, or what each call computes."""
        if not reads_inputs((args, kwargs)) and not _is_random(node.target) and node not in self._each_time:
            return [PlanTensor(tensor, None) for tensor in found]
        views = [
            view
            for tensor in found
            if (view := alias(tensor, (args, kwargs))) is not None and self._offset(view) >= 0
        ]
        return views if len(views) == len(found) else self._made(node, args, kwargs, found)

    def _made(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Sequence[torch.Tensor]
    ) -> list[PlanTensor]:
        """Append a call of a node's own operator, which writes into blocks where it can.

        New memory costs more than many an operator: the system gives large pieces page by page, and fills
        each with zeros.
        """
        writing = writes_into(node.target)
        if writing is None or not all(map(_may_lie_in_block, found)):
            slots = [self._slot(tensor) for tensor in found]
            self._append(node, args, kwargs, tuple(slot.index for slot in slots))
            return [PlanTensor(tensor, slot) for tensor, slot in zip(found, slots, strict=True)]
        made = [PlanTensor(tensor, self._block(tensor)) for tensor in found]
        overload, names = writing
        self._append(node, args, {**kwargs, **dict(zip(names, made, strict=True))}, (), overload)
        return made

    def _wait(self, call: Callable[[], object]) -> None:
        """Make a call later, unless too much memory waits."""
        self._waiting.append(call)
        if self._held > _MOST_HELD:
            self._make_waiting()

    def _make_calls(self, arguments: Any) -> None:
        """Make the calls that wait, if one of them may write what these arguments read."""
        if reads_blocks(arguments):
            self._make_waiting()

    def _make_waiting(self) -> None:
        for call in self._waiting:
            call()
        self._waiting.clear()
        self._held = 0
        self._times_made += 1

    def _append(
        self,
        node: fx.Node,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[int, ...],
        overload: Any = None,
    ) -> None:
        """Append a call of a node's own operator, or of another overload of it."""
        references = self._refs(args), {key: self._refs(value) for key, value in kwargs.items()}
        self._entries.append(
            AtenCall(overload or node.target, *references, results, describe(node, CONVERTERS))
        )

    def _described(self, node: fx.Node, primitive: Primitive) -> EngineCall:
        """Return what a profile says of a primitive that computes a node, or moves something for it."""
        step = describe(node, CONVERTERS)
        reads = [
            primitive.layouts[key].dtype
            for key in (SRC, SRC_1, MULTIPLE_SRC, WEIGHTS)
            if key in primitive.layouts
        ]
        names = tuple(_SHORT[dtype] for dtype in reads if dtype is not None)
        written = primitive.layouts[DST].dtype
        kernel = ExecutedPrimitive(
            primitive.kind, primitive.kernel, names, _SHORT[written] if written else "", 0.0
        )
        if primitive.kind == "reorder" and not step.converts:
            step = EngineCall(name="onednn::reorder")
        return dataclasses.replace(step, kernels=(kernel,))

    def _unknown(self, node: fx.Node) -> Any:
        msg = f"{node.name} ({node.target}) gives something that a plan can't follow"
        raise BackendError(msg)

    def _computed(self, value: Any) -> Any:
        if isinstance(value, Later):
            return self.optional(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._computed(v) for v in value)
        return value

    def _slot(self, tensor: torch.Tensor) -> Slot:
        self._begins.append(_begin(tensor))
        return Slot(len(self._begins) - 1, Desc.of(tensor))

    def _refs(self, value: Any) -> Any:
        if isinstance(value, PlanTensor):
            return self._ref(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._refs(v) for v in value)
        return value

    def _ref(self, value: PlanTensor) -> Ref:
        """Return the reference to a tensor that the entry about to be appended reads or writes."""
        if value.root is None:
            return Constant(value.tensor)
        if isinstance(value.root, Slot):
            whole = value.desc == value.root.desc and not self._offset(value)
            return value.root if whole else MemoryPart(value.root, self._offset(value), value.desc)
        return MemoryPart(value.root, self._offset(value), value.desc)

    def _offset(self, value: PlanTensor) -> int:
        """Bytes from the begin of the memory, or of the tensor, that holds a tensor."""
        return _begin(value.tensor) - (self._begins[value.root.index] if isinstance(value.root, Slot) else 0)

    def _output(self, value: Any) -> Any:
        value = self._computed(value)
        if isinstance(value, PlanTensor) and isinstance(value.root, Block):
            value.root.returned = True
        return value

    def _note_last_uses(self) -> None:
        """For each block, the last entry that reads or writes it."""
        for block in self._blocks:
            block.last = block.first
        for index, entry in enumerate(self._entries):
            for ref in references(entry):
                if isinstance(ref, MemoryPart) and isinstance(ref.root, Block):
                    ref.root.last = index

    def _plan(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> ExecutionPlan:
        self._note_last_uses()
        offsets, size = solve(block for block in self._blocks if not block.returned)
        calls = [entry for entry in self._entries if isinstance(entry, PrimitiveCall)]
        scratchpads = [
            call.primitive.layouts[SCRATCHPAD].size for call in calls if SCRATCHPAD in call.primitive.layouts
        ]
        refs = [self._ref(value) if isinstance(value, PlanTensor) else value for value in outputs]
        return ExecutionPlan(
            self._entries,
            inputs,
            refs,
            slots=len(self._begins),
            arena=size,
            offsets=offsets,
            scratchpad=aligned(max(scratchpads, default=0)),
            wrong=self._wrong,
            refusals=tuple(self._refusals),
        )


def _depends_on_values(target: object) -> bool:
    """Return whether a tensor's data decides about a size or a number that an operator gives."""
    return any(tag in getattr(target, "tags", ()) for tag in _UNPLANNABLE)


def _is_random(target: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _is_of_onednn(target: object) -> bool:
    """Return whether it is an operator of torch that calls a primitive by itself."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "onednn"


def _may_lie_in_block(tensor: torch.Tensor) -> bool:
    """Return whether sizes, strides and dtype describe the whole memory layout of a result."""
    plain = tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_quantized
    return plain and tensor.numel() > 0 and not _begin(tensor)


def _begin(tensor: torch.Tensor) -> int:
    """Bytes before a tensor in its memory."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _changed(node: fx.Node) -> fx.Node:
    """Whose memory an operator changes that works in place."""
    source = first_input(node)
    return node if source is None else climb(source, lambda n: may_be_view(n) or works_in_place(n))
