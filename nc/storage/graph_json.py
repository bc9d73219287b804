"""QDQ graph ↔ JSON and named tensors.

fx writes Python source for a graph and runs it, so every name that enters that source (of nodes, inputs,
constants and keywords) is checked here before the graph is built; arguments enter it as values that this
module made.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from nc.errors import ArtefactError
from nc.graph.accuracy import Accuracy
from nc.graph.catalogue import decide_kinds, name_operators
from nc.graph.effects import Effects, children
from nc.graph.evidence import Evidence
from nc.graph.fx_utils import lazy_module
from nc.graph.plan import Applied, Plan
from nc.graph.qdq import Finding, QDQGraph
from nc.graph.signature import Leaf, Parameter, Signature, ValueRead, check_leaf
from nc.graph.size_conditions import NAME, SizeCondition, parsed
from nc.graph.tensor_meta import TENSORS, Size, Traced, hint_of
from nc.graph.views import returned
from nc.storage import allowlist, arguments, json_values, pytree_json
from nc.storage.arguments import check_codes

_WORD = re.compile(r"\w+", re.ASCII)
#: What safetensors can hold.
_STORABLE = frozenset(json_values.DTYPES.values()) - {torch.complex128}


def encode(graph: QDQGraph) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a graph as JSON and tensors.

    Returns:
        Plain values with the keys signature, plan, notes, float_bytes, sqnr_vs_fp32_db, algorithms, changes,
        accuracy, health, evidence, nodes, sizes and memory_order; and contiguous tensors named
        "constant.<name>", "example.<index>" and, where the graph knows them, "expected.<index>" for outputs
        that are tensors; none of them share memory.

    Raises:
        ArtefactOperatorError: an operator is not on the allow-list.
        ArtefactError: a constant, an argument or a container that an artefact can't hold.
    """
    module, signature = graph.module, graph.signature
    sizes = _Sizes(signature, module)
    order: dict[str, list[int]] = {}
    tensors: dict[str, torch.Tensor] = {}
    constants = {
        f"constant.{n.target}": getattr(module, n.target) for n in module.graph.nodes if n.op == "get_attr"
    }
    examples = {f"example.{i}": tensor for i, tensor in enumerate(graph.example)}
    expected = {f"expected.{i}": tensor for i, tensor in _storable(graph.expected).items()}
    for name, tensor in {**constants, **examples, **expected}.items():
        tensors[name] = _flat(name, tensor, order)
    _unshare(tensors)
    document = {
        "signature": _encode_signature(signature, sizes),
        "plan": graph.plan.to_dict(),
        "notes": dict(graph.notes),
        "float_bytes": graph.float_bytes,
        "sqnr_vs_fp32_db": graph.sqnr_vs_fp32_db
        if math.isfinite(graph.sqnr_vs_fp32_db)
        else str(graph.sqnr_vs_fp32_db),
        "algorithms": [dataclasses.asdict(applied) for applied in graph.applied],
        "changes": list(graph.changes),
        "health": [dataclasses.asdict(finding) for finding in graph.health],
        "accuracy": None if graph.accuracy is None else graph.accuracy.to_dict(),
        "evidence": None if graph.evidence is None else graph.evidence.to_dict(),
        "nodes": [_encode_node(node, sizes) for node in module.graph.nodes],
        "sizes": sizes.hints,
        "memory_order": order,
    }
    return document, tensors


def check_operators(document: Mapping[str, Any]) -> None:
    """Raise ArtefactOperatorError for the first operator that is not on the allow-list."""
    for entry in document["nodes"]:
        if entry["op"] == "call_function":
            allowlist.check(entry["target"], entry["name"])


def decode(document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> QDQGraph:
    """Return the inverse of `encode`; takes the tensors as they are.

    Raises:
        ArtefactOperatorError: an operator is not on the allow-list, or not in this version of torch.
        Exception: of any other type, when the document is not what `encode` writes.
    """
    order = document["memory_order"]
    tensors = {name: _in_order(tensor, order.get(name)) for name, tensor in tensors.items()}
    constants = {n.removeprefix("constant."): t for n, t in tensors.items() if n.startswith("constant.")}
    example = tuple(tensors[f"example.{i}"] for i in range(sum(n.startswith("example.") for n in tensors)))
    signature = _decode_signature(document["signature"])
    sizes = {name: Size(name, hint) for name, hint in document["sizes"].items()}
    module = _decode_module(document["nodes"], constants, sizes)
    _check_contract(module, signature, example)
    check_codes(module)
    plan = Plan.from_dict(document["plan"])
    _check_facts(document, module, plan)
    return QDQGraph(
        module=module,
        signature=signature,
        plan=plan,
        example=example,
        notes=document["notes"],
        float_bytes=document["float_bytes"],
        sqnr_vs_fp32_db=float(document["sqnr_vs_fp32_db"]),
        applied=_applied(document),
        changes=tuple(map(str, document["changes"])),
        expected=_expected(module, tensors),
        health=tuple(Finding(**entry) for entry in document["health"]),
        accuracy=Accuracy.from_dict(document["accuracy"]) if document.get("accuracy") is not None else None,
        evidence=Evidence.from_dict(document["evidence"]) if document.get("evidence") is not None else None,
    )


def _storable(outputs: tuple[Any, ...] | None) -> dict[int, torch.Tensor]:
    """Return the outputs that are tensors, by number; nothing where one of them can't be stored."""
    tensors = {i: value for i, value in enumerate(outputs or ()) if isinstance(value, torch.Tensor)}
    return {} if any(_is_unstorable(tensor) for tensor in tensors.values()) else tensors


def _expected(module: fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """Return the stored outputs of the graph for its example; None if they were not stored."""
    outputs = {
        int(name.removeprefix("expected.")): tensor
        for name, tensor in tensors.items()
        if name.startswith("expected.")
    }
    count = len(returned(module))
    if any(i >= count for i in outputs):
        msg = f"there are {count} outputs, but an expected value for number {max(outputs)}"
        raise ValueError(msg)
    return tuple(outputs.get(i) for i in range(count)) if outputs else None


def _applied(document: Mapping[str, Any]) -> tuple[Applied, ...]:
    """Return what each algorithm did."""
    return tuple(
        Applied(
            str(a["algorithm"]),
            tuple(map(str, a["operators"])),
            str(a["text"]),
            _rows(a.get("rows", [])),
        )
        for a in document["algorithms"]
    )


def _rows(data: Sequence[Sequence[object]]) -> tuple[tuple[str, ...], ...]:
    """Return a table: rows of one length, and sentences, which are rows of one cell."""
    if not isinstance(data, (list, tuple)) or not all(isinstance(row, (list, tuple)) and row for row in data):
        msg = f"expected a table as a list of rows, but got {data!r}"
        raise TypeError(msg)
    rows = tuple(tuple(map(str, row)) for row in data)
    if len({len(row) for row in rows if len(row) > 1}) > 1:
        msg = "the rows of a table have different lengths"
        raise ValueError(msg)
    return rows


def _check_contract(module: fx.GraphModule, signature: Signature, example: tuple[torch.Tensor, ...]) -> None:
    inputs = sum(n.op == "placeholder" for n in module.graph.nodes)
    counts = {
        "leaves": (len(signature.leaves), signature.in_spec.num_leaves),
        "inputs": (sum(leaf.used for leaf in signature.leaves), inputs),
        "example inputs": (len(example), inputs),
        "outputs": (len(returned(module)), signature.outputs),
    }
    for what, (got, expected) in counts.items():
        if got != expected:
            msg = f"{got} {what}, expected {expected}"
            raise ValueError(msg)
    _check_parameters(signature)
    sizes: dict[str, int] = {}
    for leaf, tensor in zip((leaf for leaf in signature.leaves if leaf.used), example, strict=True):
        check_leaf(leaf, tensor, sizes)


def _check_parameters(signature: Signature) -> None:
    """Raise ValueError for parameters that have not the names, types or structures of the inputs."""
    names = [p.name for p in signature.parameters]
    captured = [p.name for p in signature.parameters if p.captured]
    if len(set(names)) != len(names) or captured != list(signature.in_spec.context):
        msg = (
            f"the parameters {', '.join(map(str, names))} are not those of the inputs, "
            f"{signature.in_spec.context}"
        )
        raise ValueError(msg)
    structures = dict(zip(captured, children(signature.in_spec), strict=True))
    for p in signature.parameters:
        are_flags = all(isinstance(flag, bool) for flag in (p.positional, p.captured, p.variadic, p.keyword))
        if not are_flags or (p.variadic and p.captured and structures[p.name].type is not tuple):
            msg = f"parameter {p.name!r} is malformed"
            raise ValueError(msg)


def _check_facts(document: Mapping[str, Any], module: fx.GraphModule, plan: Plan) -> None:
    """Return whether what the report prints has the types that it needs, and every operator a decision."""
    types: dict[str, type | tuple[type, ...]] = {
        "notes": dict,
        "float_bytes": int,
        "sqnr_vs_fp32_db": (int, float, str),
    }
    wrong = [key for key, expected in types.items() if not isinstance(document[key], expected)]
    if wrong or not all(isinstance(text, str) for pair in document["notes"].items() for text in pair):
        msg = f"unexpected types in {', '.join(wrong) or 'notes'}"
        raise ValueError(msg)
    texts = [text for d in plan.decisions for text in (d.operator, d.kind, d.rules, d.reason)]
    if not all(isinstance(text, str) for text in texts):
        msg = "a decision of the plan has other values than texts"
        raise ValueError(msg)
    decided = {d.operator for d in plan.decisions}
    for node in module.graph.nodes:
        if "operator" in node.meta and node.meta["operator"] not in decided:
            msg = f"node {node.name!r} is of operator {node.meta['operator']!r}, which has no decision"
            raise ValueError(msg)


# --- tensors ---


def _flat(name: str, tensor: torch.Tensor, order: dict[str, list[int]]) -> torch.Tensor:
    """Return a contiguous tensor, whose memory can be written as it is.

    If its dimensions are permuted, `order` gets their order.
    """
    if _is_unstorable(tensor):
        msg = (
            f"Tensor {name!r} ({tensor.dtype}, {tensor.layout}) can't be stored: artefacts hold plain dense "
            "tensors. Convert it to one in the model."
        )
        raise ArtefactError(msg)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    if dims != sorted(dims) and tensor.permute(dims).is_contiguous():
        order[name] = dims  # kernels are chosen by layout and round differently, so it is part of the model
        return tensor.permute(dims)
    return tensor.contiguous()


def _is_unstorable(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in _STORABLE


def _in_order(tensor: torch.Tensor, dims: list[int] | None) -> torch.Tensor:
    return tensor if dims is None else tensor.permute([dims.index(d) for d in range(tensor.dim())])


def _unshare(tensors: dict[str, torch.Tensor]) -> None:
    """Copy tensors that share memory with another one: safetensors refuses them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            tensors[name] = tensor.clone()
        seen.add(address)


# --- sizes and the values that nodes had when they were traced ---


class _Sizes:
    """Names for free sizes: n0, n1, … as they appear, so that the same graph gives the same names.

    Attributes:
        hints: name → the size that it had when the model was traced; None where it depends on data.
    """

    def __init__(self, signature: Signature, module: fx.GraphModule) -> None:
        self.hints: dict[str, int | None] = {}
        self._names: dict[object, str] = {}
        self._alias: dict[object, str] = {}
        for dim in (d for leaf in signature.leaves for d in leaf.dims):
            self.of_dim(dim)
        inputs = (n for n in module.graph.nodes if n.op == "placeholder")
        for leaf, node in zip((leaf for leaf in signature.leaves if leaf.used), inputs, strict=True):
            for dim, size in zip(leaf.dims, node.meta["val"].shape, strict=True):
                if isinstance(dim, str) and not isinstance(size, int):
                    self._alias[_key(size)] = dim

    def of_dim(self, dim: int | str) -> int | str:
        """Return a dimension of the signature."""
        return dim if isinstance(dim, int) else self._name(dim)

    def of_value(self, size: int | torch.SymInt | Size) -> int | str:
        """Return a size of a traced value; an expression of sizes gets its own name."""
        if isinstance(size, int):
            return size
        fixed: int | None = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
        if fixed is not None:
            return fixed
        name = self._name(self._alias.get(_key(size), _key(size)))
        if name not in self.hints:
            self.hints[name] = hint_of(size)
        return name

    def _name(self, key: object) -> str:
        return self._names.setdefault(key, f"n{len(self._names)}")

    def encode(self, value: object) -> json_values.Json:
        """Return dtype and shape of a traced tensor, or of several; None for other values: none is needed."""
        if isinstance(value, TENSORS):
            return {
                "dtype": json_values.dtype_name(value.dtype, "A traced value"),
                "shape": [self.of_value(s) for s in value.shape],
            }
        return [self.encode(v) for v in value] if isinstance(value, (list, tuple)) else None


def _key(size: torch.SymInt | Size) -> object:
    """Return what equal sizes have in common.

    For a symbol it is an expression, compared as it is: to print long ones takes seconds.
    """
    return size if isinstance(size, Size) else size.node.expr


def _decode_value(data: Any, sizes: Mapping[str, Size]) -> Any:
    """Return the inverse of `_Sizes.encode`."""
    if data is None:
        return None
    if isinstance(data, list):
        return [_decode_value(v, sizes) for v in data]
    shape = tuple(sizes[s] if isinstance(s, str) else s for s in data["shape"])
    if not all(isinstance(size, Size) or type(size) is int for size in shape):
        msg = f"expected the sizes of a tensor, but got {data['shape']!r}"
        raise TypeError(msg)
    return Traced(json_values.DTYPES[data["dtype"]], shape)


# --- nodes ---


def _encode_node(node: fx.Node, sizes: _Sizes) -> dict[str, Any]:
    where = f"Node {node.name!r}"
    target = allowlist.name_of(node.target, node.name) if not isinstance(node.target, str) else node.target
    if not isinstance(node.target, str):  # what `decode` would refuse
        try:
            arguments.check(node.target, node.args, node.kwargs)
        except ValueError as error:
            msg = f"{where} can't be stored: {error}."
            raise ArtefactError(msg) from error
    entry: dict[str, Any] = {"name": node.name, "op": node.op, "target": target}
    if node.args:
        entry["args"] = [json_values.encode(a, where) for a in node.args]
    if node.kwargs:
        entry["kwargs"] = {k: json_values.encode(v, where) for k, v in node.kwargs.items()}
    entry.update({key: node.meta[key] for key in ("operator", "fqn") if key in node.meta})
    value = sizes.encode(node.meta.get("val"))
    if value is not None:
        entry["value"] = value
    return entry


def _decode_module(
    entries: list[dict[str, Any]], constants: Mapping[str, torch.Tensor], sizes: Mapping[str, Size]
) -> fx.GraphModule:
    root = torch.nn.Module()
    for name, tensor in constants.items():
        _check_word(name)
        root.register_buffer(name, tensor)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for entry in entries:
        name = entry["name"]
        _check_identifier(name)
        nodes[name] = _decode_node(graph, entry, constants, nodes)
        if nodes[name].name != name:
            msg = f"node name {name!r} is taken, or reserved"
            raise ValueError(msg)
        nodes[name].meta.update({key: entry[key] for key in ("operator", "fqn") if key in entry})
        if "value" in entry:
            nodes[name].meta["val"] = _decode_value(entry["value"], sizes)
    if [e["op"] for e in entries].count("output") != 1 or entries[-1]["op"] != "output":
        msg = "a graph has one output, at its end"
        raise ValueError(msg)
    graph.lint()
    module = lazy_module(root, graph)
    name_operators(graph)
    decide_kinds(module)
    return module


def _decode_node(
    graph: fx.Graph,
    entry: dict[str, Any],
    constants: Mapping[str, torch.Tensor],
    nodes: Mapping[str, fx.Node],
) -> fx.Node:
    name, op, target = entry["name"], entry["op"], entry["target"]
    args = tuple(json_values.decode(a, nodes) for a in entry.get("args", []))
    kwargs = {k: json_values.decode(v, nodes) for k, v in entry.get("kwargs", {}).items()}
    match op:
        case "call_function":
            target = allowlist.resolve(target, name)
            try:
                arguments.check(target, args, kwargs)
            except ValueError as error:
                msg = f"node {name!r}: {error}"
                raise ValueError(msg) from None
        case "placeholder" if not args and not kwargs:
            _check_argument(target)
        case "get_attr" if not args and not kwargs and target in constants:
            pass  # whose names are checked
        case "output" if len(args) == 1 and isinstance(args[0], tuple) and not kwargs:
            target = "output"
        case _:
            msg = f"node {name!r} is a malformed {op!r}"
            raise ValueError(msg)
    return graph.create_node(op, target, args, kwargs, name)


def _check_word(name: str) -> None:
    if not _WORD.fullmatch(name):
        msg = f"{name!r} is not a name"
        raise ValueError(msg)


def _check_identifier(name: str) -> None:
    _check_word(name)
    _check_argument(name)


def _check_argument(name: str) -> None:
    """Raise ValueError for what is not the name of an argument as Python has it, in letters of any script."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != unicodedata.normalize("NFKC", name):
        msg = f"{name!r} is not an identifier"
        raise ValueError(msg)


# --- the call contract ---


def _encode_signature(signature: Signature, sizes: _Sizes) -> dict[str, Any]:
    leaves = []
    for leaf in signature.leaves:
        entry: dict[str, Any] = {"path": leaf.path, "used": leaf.used}
        if leaf.dtype is None:
            entry["value"] = json_values.encode(leaf.value, f"Argument {leaf.path!r}")
        else:
            entry["dtype"] = json_values.dtype_name(leaf.dtype, f"Argument {leaf.path!r}")
            entry["dims"] = [sizes.of_dim(d) for d in leaf.dims]
            if leaf.held:
                entry["held"] = list(leaf.held)
        leaves.append(entry)
    parameters = [
        {"name": p.name, "positional": p.positional, "captured": p.captured, "variadic": p.variadic}
        for p in signature.parameters
    ]
    return {
        "parameters": parameters,
        "inputs": pytree_json.encode(signature.in_spec, "inputs"),
        "leaves": leaves,
        "outputs": pytree_json.encode(signature.out_spec, "outputs"),
        **(
            {"reads": [{"value": r.value, "where": r.where} for r in signature.reads]}
            if signature.reads
            else {}
        ),
        **(
            {"conditions": [dataclasses.asdict(c) for c in signature.conditions]}
            if signature.conditions
            else {}
        ),
        **({"effects": _encode_effects(signature.effects)} if signature.effects else {}),
        **({"model": signature.model} if signature.model else {}),
    }


def _decode_signature(data: dict[str, Any]) -> Signature:
    in_spec: pytree.TreeSpec = pytree_json.decode(data["inputs"], inputs=True)
    leaves = []
    for entry in data["leaves"]:
        if "dtype" in entry:
            dims = tuple(entry["dims"])
            held = tuple(map(int, entry.get("held", ())))
            leaves.append(
                Leaf(entry["path"], json_values.DTYPES[entry["dtype"]], dims, used=entry["used"], held=held)
            )
        else:
            leaves.append(
                Leaf(entry["path"], None, value=json_values.decode(entry["value"]), used=entry["used"])
            )
    parameters = tuple(Parameter(**p) for p in data["parameters"])
    reads = tuple(_decode_read(entry) for entry in data.get("reads", ()))
    conditions = tuple(_decode_condition(entry, leaves) for entry in data.get("conditions", ()))
    out_spec = pytree_json.decode(data["outputs"])
    effects = _decode_effects(data["effects"], leaves, out_spec) if "effects" in data else Effects()
    return Signature(
        parameters, in_spec, tuple(leaves), out_spec, reads, conditions, effects, str(data.get("model", ""))
    )


def _encode_effects(effects: Effects) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    if effects.after is not None:
        entries = {"after": pytree_json.encode(effects.after, "inputs"), "sources": list(effects.sources)}
        entries["objects"] = [[list(out), list(given)] for out, given in effects.objects]
    return {
        "written": list(effects.written),
        "returned": [list(pair) for pair in effects.returned],
        **entries,
    }


def _decode_effects(data: dict[str, Any], leaves: Sequence[Leaf], out_spec: pytree.TreeSpec) -> Effects:
    after = pytree_json.decode(data["after"], inputs=True) if "after" in data else None
    sources = tuple(data.get("sources", ()))
    returned = tuple((int(i), int(value)) for i, value in data["returned"])
    objects = tuple((tuple(map(int, out)), tuple(map(int, given))) for out, given in data.get("objects", ()))
    effects = Effects(tuple(data["written"]), after, sources, returned, objects)
    are_inputs = _are_inputs(effects, leaves)
    are_outputs = len(dict(returned)) == len(returned) and all(
        0 <= i < out_spec.num_leaves and 0 <= value < effects.values for i, value in returned
    )
    are_containers = all(
        after is not None and _is_container(out_spec, out) and _is_container(after, given)
        for out, given in objects
    )
    if not (are_inputs and are_outputs and are_containers):
        msg = "the effects are not those of the inputs and outputs"
        raise ValueError(msg)
    return effects


def _are_inputs(effects: Effects, leaves: Sequence[Leaf]) -> bool:
    """Return whether tensors that are written, and sources of new entries, are inputs of the graph."""
    tensors = [i for i, leaf in enumerate(leaves) if leaf.used]
    return (
        len(effects.sources) == (0 if effects.after is None else effects.after.num_leaves)
        and all(i in tensors for i in effects.written)
        and all(i is None or (type(i) is int and 0 <= i < len(leaves)) for i in effects.sources)
    )


def _is_container(spec: pytree.TreeSpec, path: Sequence[int]) -> bool:
    """Return whether something that holds values is at a place of a structure."""
    for i in path:
        below = children(spec)
        if not 0 <= i < len(below):
            return False
        spec = below[i]
    return not spec.is_leaf()


def _decode_read(entry: dict[str, Any]) -> ValueRead:
    if not isinstance(entry["value"], int) or not isinstance(entry["where"], str):
        msg = f"a value that the model reads is {entry['value']!r}, expected a bool or an int"
        raise TypeError(msg)
    return ValueRead(entry["value"], entry["where"])


def _decode_condition(entry: dict[str, Any], leaves: Sequence[Leaf]) -> SizeCondition:
    condition = SizeCondition(**entry)
    if (
        not isinstance(condition.text, str)
        or not isinstance(condition.where, str)
        or not isinstance(condition.silent, bool)
    ):
        msg = f"a condition on sizes is {entry!r}, expected two texts and a bool"
        raise TypeError(msg)
    parsed(condition.text)
    for match in NAME.finditer(condition.text):
        i, d = int(match[1]), int(match[2])
        if i >= len(leaves) or d >= len(leaves[i].dims):
            msg = f"{condition.text!r} is about a dimension that no input has"
            raise ValueError(msg)
    return condition
