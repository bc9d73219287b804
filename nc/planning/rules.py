"""resolve(config, graph, capabilities) → Plan: which rule applies to which operator.

A pure function that needs no data.

The most specific rule decides how an operator is quantized, or that it stays fp32; `nc.planning.matching`
finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nc.capture.capture import Graph
from nc.capture.naming import Operator
from nc.config import AnyConfig
from nc.errors import ConfigError, NCError, UnsupportedError
from nc.formats import (
    BF16,
    FLOAT,
    PER_COLUMN,
    PER_TOKEN,
    Capabilities,
    FakeSpec,
    Mode,
    OpSpec,
    OpSupport,
    SmoothSpec,
    TensorFormat,
    dtype,
    granularity,
)
from nc.formats.reasons import NO_RULE, WHITE_LIST, Cause, DecidingRule, Level, Reason
from nc.graph.catalogue import PRODUCTS, RECURRENT, WEIGHTED, kind_of_node, weight_axis
from nc.graph.dataflow import behind_matmul, useless_adds, weighs_values
from nc.graph.fake_quant import SIMULATED_ONLY
from nc.graph.placement import works_in_place
from nc.graph.plan import INPUTS, OUTPUTS, Decision, Plan
from nc.graph.recurrent import float_weights, is_projected
from nc.planning.fake_rules import fake_spec
from nc.planning.matching import DEFAULT, Match, check_rules, has_kernel, matches_of, merged, only_named
from nc.planning.sizes import Sizes

#: The right side of a matmul with ranges of each call: one for what each result sums.
_COLUMNS = TensorFormat(
    dtype=dtype("int8"), symmetric=True, granularity=PER_COLUMN, narrow=True, dynamic=True
)
#: How ranges are found, for messages, and what asks for it.
_RANGES: tuple[tuple[Mode, str, str], ...] = (
    ("dynamic", "ranges found at each call", "+ nc.DynamicQuantConfig()"),
    ("static", "ranges from calibration", "+ nc.StaticQuantConfig()"),
)
#: Values of attention. Each has its own range, so that no other one changes how it is rounded.
_ROWS = dataclasses.replace(_COLUMNS, granularity=PER_TOKEN)


def resolve(config: AnyConfig, graph: Graph, capabilities: Capabilities, *, strict: bool = True) -> Plan:
    """`check_rules`, then `decide`."""
    check_rules(config, graph, strict=strict)
    return decide(config, graph, capabilities)


def decide(config: AnyConfig, graph: Graph, capabilities: Capabilities, placement: str = INPUTS) -> Plan:
    """Decide for every operator.

    Args:
        config: the user's configuration with its local rules.
        graph: the captured model.
        capabilities: what the backend can run.
        placement: see `Plan`.

    Raises:
        UnsupportedError: a rule asks an operator for what the backend has no kernel for; names operator,
            field and legal values. Or outputs should be codes in a model that changes tensors in place.
        ConfigError: fields of several levels contradict each other.
    """
    if placement == OUTPUTS and works_in_place(graph.module):
        msg = (
            'The model changes tensors in place, so placement="outputs" has no one place for the codes of '
            'an output. Use "inputs".'
        )
        raise UnsupportedError(msg)
    sizes = Sizes(graph)
    modules = frozenset(graph.submodules)
    decisions = [
        _with_size(_decide(op, config, sizes, capabilities, modules), op, sizes) for op in graph.operators
    ]
    mixers = behind_matmul(graph.module)
    decisions = [_unsmoothed(d) if d.operator in mixers else d for d in decisions]
    grouped = _with_channels_of_several_groups(graph)
    decisions = [
        _with_grouped_weight(d, capabilities.row(d.kind)) if d.operator in grouped else d for d in decisions
    ]
    # dynamic operators read and give fp32, so an int8 addition beside one gains nothing
    asked = {d.operator for d in decisions if d.spec.mode == "static"}
    # an operator that a rule names, by name or type, stays quantized
    explicit = {d.operator for d in decisions if d.decided.level is not Level.GLOBAL}
    fused_add = capabilities.fused_add if placement == INPUTS else frozenset()
    useless = useless_adds(graph.module, asked, keep=explicit, fused_add=fused_add)
    decisions = [
        dataclasses.replace(d, spec=FLOAT, why=useless[d.operator]) if d.operator in useless else d
        for d in decisions
    ]
    return plan_of(decisions, capabilities, placement)


def plan_of(decisions: Iterable[Decision], capabilities: Capabilities, placement: str = INPUTS) -> Plan:
    """Return the plan with these decisions on a backend.

    Raises:
        UnsupportedError: an operator should compute in bf16, and the backend cannot.
    """
    low = next((d for d in decisions if d.spec.bf16), None)
    if low is not None and capabilities.why_no_bf16:
        msg = (
            f"Operator {low.operator!r} can't compute in bf16 on backend {capabilities.backend!r}: "
            f"{capabilities.why_no_bf16}. Leave "
            'remainder="bf16" and dtypes "bf16" out of the configuration.'
        )
        raise UnsupportedError(msg)
    isa = (*capabilities.isa, *(capabilities.bf16_isa if low is not None else ()))
    return Plan(decisions=tuple(decisions), backend=capabilities.backend, isa=isa, placement=placement)


def _with_size(decision: Decision, op: Operator, sizes: Sizes) -> Decision:
    """Return the decision with the weights and the multiply-adds of its operator."""
    weights = tuple((weight.name, weight.shape) for weight in op.weights)
    recurrent = op.kind in RECURRENT and decision.spec.mode == "dynamic"
    return dataclasses.replace(
        decision,
        weights=weights,
        float_weights=float_weights(sizes.node(op)) if recurrent else (),
        multiply_adds=sizes.multiply_adds(op),
    )


def _with_channels_of_several_groups(graph: Graph) -> set[str]:
    """Return the operators along whose weight channels of several groups are mixed."""
    weighted = (n for n in graph.module.graph.nodes if "operator" in n.meta and kind_of_node(n) in WEIGHTED)
    return {node.meta["operator"] for node in weighted if weight_axis(node) is None}


def _values(
    op: Operator, matches: list[Match], row: OpSupport | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of the rules that match, and where each comes from.

    They are completed by what the kernel takes.

    Raises:
        NCError: they contradict each other.
    """
    chosen = matches[0]
    values, sources = merged(matches)
    if row is not None and chosen.config.family == "dynamic":
        _take_granularity_of_kernel(values, sources, row)
    if (
        row is not None
        and row.symmetric
        and spec_of(chosen.config.algorithm, values, op.kind).mode == "static"
    ):
        _take_codes_of_kernel(values, sources, row, is_global=chosen.rule.level is Level.GLOBAL)
    try:
        chosen.config.check_values(values)
    except NCError as error:
        msg = f"Operator {op.name!r} (rule: {chosen.rule}): {error}"
        raise type(error)(msg) from error
    return values, sources


def _decide(
    op: Operator, config: AnyConfig, sizes: Sizes, capabilities: Capabilities, modules: Collection[str]
) -> Decision:
    base: dict[str, Any] = {"operator": op.name, "kind": op.kind, "module_type": op.module_type}
    row = capabilities.row(op.kind)
    matches = matches_of(op, config, row, modules)
    simulated = bool(matches) and matches[0].config.family == "fake_quant" and op.kind in SIMULATED_ONLY
    if not op.quantizable and not simulated:
        rule = matches[0].rule if matches and matches[0].rule.level is Level.NAME else NO_RULE
        return Decision(**base, decided=rule, why=op.why or Cause.FOLLOWS())
    if not matches:
        return Decision(**base, decided=WHITE_LIST, why=Cause.NOT_LISTED())
    chosen = matches[0]
    base["decided"] = chosen.rule
    if chosen.config.is_float:
        return _float(
            base, chosen.config.w_dtype, Cause.ASKED(dtype=chosen.config.w_dtype), _excluded(matches)
        )
    if chosen.config.family == "weight_only":  # its layers were replaced before capture
        return _float(base, "fp32", Cause.NO_LAYER())
    values, sources = _values(op, matches, row)
    base["fields"] = tuple((name, str(values[name]), source) for name, source in sources.items())
    if chosen.config.family == "fake_quant":
        return _simulated(base, op, values, row, sizes, capabilities)
    spec = _with_right_side(spec_of(chosen.config.algorithm, values, op.kind), op, sizes)
    base["keep_inaccurate"] = values.get("keep_inaccurate", False)
    base["fallback"] = "fp32" if "bf16" in _excluded(matches) else values.get("remainder", "fp32")
    why = _why_no_kernel(op, spec, row, chosen, capabilities) or _why_no_projections(
        op, spec, row, sizes, capabilities
    )
    if why is None and spec.mode == "dynamic":
        why = _why_no_gain(op, spec, values, chosen, sizes, capabilities)
    if why is not None:
        return _float(base, base["fallback"], why)
    if row is not None and not row.weights:
        spec = dataclasses.replace(spec, weight=None)
    return Decision(**base, spec=_reduced(spec, op.kind, capabilities))


def _with_right_side(spec: OpSpec, op: Operator, sizes: Sizes) -> OpSpec:
    """Return the spec with what the right side of a matmul has, where ranges are found in each call."""
    if spec.mode != "dynamic" or op.kind != "matmul":
        return spec
    return dataclasses.replace(spec, right=_ROWS if weighs_values(sizes.node(op)) else _COLUMNS)


def _why_no_gain(
    op: Operator,
    spec: OpSpec,
    values: Mapping[str, Any],
    chosen: Match,
    sizes: Sizes,
    capabilities: Capabilities,
) -> Reason | None:
    """Why dynamic int8 has nothing to gain for an operator."""
    is_named = chosen.rule.level in (Level.NAME, Level.PATTERN)
    return None if is_named else sizes.one_output(op)


def _simulated(
    base: Mapping[str, Any],
    op: Operator,
    values: Mapping[str, Any],
    row: OpSupport | None,
    sizes: Sizes,
    capabilities: Capabilities,
) -> Decision:
    """Return the decision for an operator whose formats are simulated.

    Raises:
        UnsupportedError: the backend simulates nothing.
        ConfigError: values contradict each other.
    """
    can = row is not None and row.supports("fake_quant")
    if not can and op.kind not in WEIGHTED | SIMULATED_ONLY:
        return Decision(**base, why=op.why or _no_kernel(op.kind, OpSpec(fake=FakeSpec()), capabilities))
    try:
        fake = fake_spec(values, op.kind, sizes.node(op))
    except ConfigError as error:
        msg = f"Operator {op.name!r} ({op.kind}, rule: {base['decided']}): {error}"
        raise ConfigError(msg) from error
    if not fake.roles:
        return Decision(**base, why=op.why or Cause.ASKED(dtype="fp32"))
    if not can:
        raise _not_simulated(op.name, op.kind, base["decided"], capabilities)
    return Decision(**base, spec=OpSpec(fake=fake))


def _float(base: Mapping[str, Any], dtype: str, why: Reason, excluded: Collection[str] = ()) -> Decision:
    """Return the decision for an operator that is not quantized.

    Raises:
        ConfigError: a rule asks for a precision that another one excludes.
    """
    if dtype == "bf16" and dtype in excluded:
        msg = (
            f"Operator {base['operator']!r} (rule: {base['decided']}): {why}, but {dtype!r} is in "
            f"excluded_precisions={tuple(excluded)}."
        )
        raise ConfigError(msg)
    if dtype == "bf16" and base["kind"] not in PRODUCTS:
        return Decision(**base, why=Cause.NO_BF16_FORM(reason=why, kind=base["kind"]))
    return Decision(**base, spec=BF16 if dtype == "bf16" else FLOAT, why=why)


def _excluded(matches: Iterable[Match]) -> Collection[str]:
    """Precisions that an operator may not use, from the most specific rule that lists any."""
    name = "excluded_precisions"
    return next((m.config.given[name] for m in matches if name in m.config.given), ())


def _take_granularity_of_kernel(values: dict[str, Any], sources: dict[str, str], row: OpSupport) -> None:
    """Use the granularity of the kernel (torch's LSTM and GRU have one only) if no rule sets another one."""
    name = "act_granularity"
    if sources[name] == DEFAULT and row.dynamic and values[name] not in row.dynamic:
        values[name], sources[name] = row.dynamic[0], "kernel"


def _with_granularity_of_kernel(decision: Decision, row: OpSupport) -> Decision:
    """Return the decision with a granularity that the kernel has for ranges found in each call.

    This is done if no rule sets another one.
    """
    activation = decision.spec.activation
    fields = {name: (value, source) for name, value, source in decision.fields}
    values, sources = ({name: field[i] for name, field in fields.items()} for i in (0, 1))
    if decision.spec.mode != "dynamic" or activation is None or "act_granularity" not in fields:
        return decision
    _take_granularity_of_kernel(values, sources, row)
    changed = dataclasses.replace(activation, granularity=granularity(values["act_granularity"]))
    new = tuple((name, values[name], sources[name]) for name in fields)
    return dataclasses.replace(
        decision, spec=dataclasses.replace(decision.spec, activation=changed), fields=new
    )


def _take_codes_of_kernel(
    values: dict[str, Any], sources: dict[str, str], row: OpSupport, *, is_global: bool
) -> None:
    """Use the codes of a kernel that takes symmetric ones only.

    This is done if no rule for this operator or type sets others.
    """
    for name, value in (("act_dtype", row.activations[0]), ("act_sym", True)):
        if values[name] != value and (is_global or sources[name] == DEFAULT):
            values[name], sources[name] = value, "kernel"


def _are_codes_of_kernel(spec: OpSpec, row: OpSupport) -> bool:
    """Return whether a kernel that takes symmetric codes only takes these."""
    return spec.input(0).symmetric and str(spec.input(0).dtype) in row.activations


def spec_of(algorithm: str, values: Mapping[str, Any], kind: str) -> OpSpec:
    """Return the spec of an operator of some kind, for a strategy and the values of its fields."""
    weight = TensorFormat(
        dtype=dtype(values["w_dtype"]),
        symmetric=values["w_sym"],
        granularity=granularity(values["w_granularity"]),
        algo=values["w_algo"],
        narrow=True,
    )
    activation = TensorFormat(
        dtype=dtype(values["act_dtype"]),
        symmetric=values["act_sym"],
        granularity=granularity(values["act_granularity"]),
    )
    if algorithm == "dynamic":
        return OpSpec(activation=dataclasses.replace(activation, dynamic=True), weight=weight)
    percentile = values["percentile"] if values["act_algo"] in ("percentile", "auto") else None
    smooth = None
    if algorithm == "smooth" and kind == "linear":
        options = {f.name: values[f.name] for f in dataclasses.fields(SmoothSpec)}
        smooth = SmoothSpec(**{**options, "alpha": None if values["alpha"] == "auto" else values["alpha"]})
    activation = dataclasses.replace(activation, algo=values["act_algo"], percentile=percentile)
    return OpSpec(activation=activation, weight=weight, smooth=smooth)


def fit(plan: Plan, capabilities: Capabilities) -> Plan:
    """Return a plan adapted to another backend. The calibration stays valid.

    Raises:
        UnsupportedError: that backend has no kernel for an operator's dtype, or cannot compute in bf16.
    """
    if plan.backend == capabilities.backend:
        return plan
    decisions = []
    for d in plan.decisions:
        row = capabilities.row(d.kind)
        if not d.spec.quantized:
            decisions.append(d)
        elif d.spec.mode == "fake_quant" and (row is None or not row.supports("fake_quant")):
            raise _not_simulated(d.operator, d.kind, d.decided, capabilities)
        elif (
            row is None
            or not row.supports(d.spec.mode)
            or (row.symmetric and not _are_codes_of_kernel(d.spec, row))
        ):
            low = d.fallback == "bf16" and d.kind in PRODUCTS
            why = _no_kernel(d.kind, d.spec, capabilities)
            decisions.append(dataclasses.replace(d, spec=BF16 if low else FLOAT, why=why))
        else:
            d = _with_granularity_of_kernel(d, row)  # the same decision for this backend
            _check_dtypes(d.operator, d.spec, row, d.decided, capabilities)
            decisions.append(dataclasses.replace(d, spec=_reduced(d.spec, d.kind, capabilities)))
    return dataclasses.replace(plan_of(decisions, capabilities, plan.placement), algorithms=plan.algorithms)


def _why_no_kernel(
    op: Operator, spec: OpSpec, row: OpSupport | None, match: Match, capabilities: Capabilities
) -> Reason | None:
    """Why an operator stays fp32; None if there is a kernel.

    Raises UnsupportedError for a dtype that no kernel takes.
    """
    if row is None or not has_kernel(match.config, row):
        return _no_kernel(op.kind, spec, capabilities)
    if only_named(match, op.kind):
        return Cause.ONLY_NAMED(kind=op.kind)
    _check_dtypes(op.name, spec, row, match.rule, capabilities)
    return None


def _not_simulated(
    operator: str, kind: str, rule: DecidingRule, capabilities: Capabilities
) -> UnsupportedError:
    """Return the error for a backend that would compute an operator in fp32.

    Formats were to be simulated there.
    """
    return UnsupportedError(
        f"Operator {operator!r} ({kind}, rule: {rule}): backend {capabilities.backend!r} simulates no number "
        "formats. Leave backend out, "
        'or say backend="reference", which does.'
    )


def _why_no_projections(
    op: Operator, spec: OpSpec, row: OpSupport | None, sizes: Sizes, capabilities: Capabilities
) -> Reason | None:
    """Why an LSTM with projections stays fp32; None where there is a kernel, and for other operators."""
    if (
        row is None
        or op.kind != "lstm"
        or str(spec.input(0).granularity) in row.projections
        or not is_projected(sizes.node(op))
    ):
        return None
    return Cause.PROJECTIONS(backend=capabilities.backend, granularity=spec.input(0).granularity)


def _no_kernel(kind: str, spec: OpSpec, capabilities: Capabilities) -> Reason:
    """Why an operator that should be quantized like this stays fp32."""
    how = {"dynamic": "dynamic int8", "fake_quant": "fake-quantization"}.get(spec.mode, "int8")
    what, row = {"backend": capabilities.backend, "kind": kind}, capabilities.row(kind)
    if row is not None and spec.mode != "fake_quant" and row.supports(spec.mode):
        return Cause.OTHER_CODES(**what, dtypes=" or ".join(row.activations))
    for mode, ranges, config in _RANGES:
        if row is not None and spec.mode not in (mode, "fake_quant") and row.supports(mode):
            return Cause.OTHER_RANGES(**what, how=how, ranges=ranges, config=config)
    return Cause.NO_KERNEL(**what, how=how)


def _check_dtypes(
    operator: str, spec: OpSpec, row: OpSupport, rule: DecidingRule, capabilities: Capabilities
) -> None:
    """Raise UnsupportedError if the kernel of a row does not take the dtype or granularity of an operator."""
    value: object
    if spec.mode == "fake_quant":
        return  # who simulates one format simulates all
    field, value, legal = "act_dtype", str(spec.input(0).dtype), row.activations
    if spec.mode == "dynamic":
        field, value, legal = "act_granularity", str(spec.input(0).granularity), row.dynamic
        if row.affine_only and spec.input(0).symmetric:
            field, value, legal = "act_sym", True, ("False",)
    elif value in legal and row.symmetric and not spec.input(0).symmetric:
        field, value, legal = "act_sym", False, ("True",)
    if value not in legal:
        msg = (
            f"Operator {operator!r} ({row.kind}): {field}={value!r} (rule: {rule}) has no kernel on backend "
            f"{capabilities.backend!r}; legal there: {', '.join(legal)}."
        )
        raise UnsupportedError(msg)


def _unsmoothed(decision: Decision) -> Decision:
    """Return the decision without SmoothQuant, unless a rule names it.

    A multiplication there splits the int8 group of attention.
    """
    if decision.spec.smooth is None or decision.decided.level in (Level.NAME, Level.PATTERN):
        return decision
    fields = tuple(
        ("alpha", "none", "reads a matmul's result") if field[0] == "alpha" else field
        for field in decision.fields
    )
    return dataclasses.replace(
        decision, spec=dataclasses.replace(decision.spec, smooth=None), fields=fields, unsmoothed=True
    )


def _with_grouped_weight(decision: Decision, row: OpSupport | None) -> Decision:
    """Return the granularity that the kernel has for a weight without an axis of output channels."""
    weight = decision.spec.weight
    if weight is None or row is None or str(weight.granularity) in row.grouped_weights:
        return decision
    text = row.grouped_weights[0]
    fields = tuple(
        ("w_granularity", text, "kernel") if f[0] == "w_granularity" else f for f in decision.fields
    )
    weight = dataclasses.replace(weight, granularity=granularity(text))
    return dataclasses.replace(
        decision, spec=dataclasses.replace(decision.spec, weight=weight), fields=fields
    )


def _reduced(spec: OpSpec, kind: str, capabilities: Capabilities) -> OpSpec:
    """Return the spec with codes whose 16-bit sums cannot overflow, where the kernel needs it on this CPU."""
    return spec.narrow() if capabilities.sums_narrow(kind, spec) else spec
