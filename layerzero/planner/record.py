"""What was planned: the steps of a plan with their kernels, prices and fusions, as a record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.scope import SCOPE
from layerzero.planner.choices import Choice, Choices, RefusedFusion
from layerzero.planner.search import Solution
from layerzero.planner.values import PlacedBlock, TensorFormat, format_of
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import AUTOCAST


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: the ops of the block that it covers, the op that runs in their place, and its kernel.

    `op` is an operator of torch, and `kernel` empty, where no kernel of ours runs; `fusion` is the kind of
    fusion, empty for a single op. `expected_us` has no transforms in it.
    """

    covers: tuple[str, ...]
    op: str
    kernel: str = ""
    fusion: str = ""
    expected_us: float = 0.0
    transforms: tuple[str, ...] = ()
    why: str = ""


class FormatChange(msgspec.Struct, frozen=True):
    """One value in another format, once for all steps that read it so; free where the block holds it."""

    value: str
    before: str
    after: str
    cost_us: float


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of a block for arguments of one signature; `str()` is a table for people.

    `expected_us` is the whole, `op_by_op_us` what the same block costs without any fusion,
    `transform_cost_total` what conversions and transforms are of it; `fused_ops` are the ops of each fused
    step. `exact` says that no cheaper plan exists at these prices. `refused` are fusions that no kernel
    takes. `measured_us` are medians of the plans that were timed, by their fusions. `held_bytes` is what
    joined and converted weights take beyond the weights. `digest` is equal where the same kernels run.
    """

    steps: tuple[PlannedStep, ...]
    conversions: tuple[FormatChange, ...]
    expected_us: float
    op_by_op_us: float
    transform_cost_total: float
    fused_ops: tuple[tuple[str, ...], ...]
    exact: bool
    refused: tuple[RefusedFusion, ...]
    policy: str
    digest: str
    block: str
    measured_us: dict[str, float] = {}
    held_bytes: int = 0

    def __str__(self) -> str:
        return render(self)

    def as_plain(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def make_record(
    block: PlacedBlock, choices: Choices, solution: Solution, alone_us: float, policy: str
) -> PlanRecord:
    """The record of a solution; `alone_us` is the cost without fusions."""
    names = _value_names(block)
    steps: list[PlannedStep] = []
    conversions: list[FormatChange] = []
    formats = {place: format_of(value.fake) for place, value in enumerate(block.values)}
    converted: set[tuple[int, TensorFormat]] = set()
    within_us = 0.0

    def read(demands: Mapping[int, TensorFormat]) -> None:
        for value, form in demands.items():
            if form != formats[value] and (value, form) not in converted:
                converted.add((value, form))
                cost_us = choices.convert_us(value, formats[value], form)
                conversions.append(FormatChange(names[value], _text(formats[value]), _text(form), cost_us))

    for alternative in solution.alternatives:
        choice: Choice = alternative.payload
        read(choice.formats)
        formats.update(dict(alternative.produces))
        converted = {pair for pair in converted if pair[0] not in dict(alternative.produces)}
        within_us += choice.within_us
        steps.append(_step(block, choice))
    read({value: format_of(block.values[value].fake) for value in block.outputs})
    transform_us = within_us + sum(each.cost_us for each in conversions)
    digest = hashlib.sha256(msgspec.json.encode([[s.covers, s.op, s.kernel, s.transforms] for s in steps]))
    return PlanRecord(
        steps=tuple(steps),
        conversions=tuple(conversions),
        expected_us=sum(step.expected_us for step in steps) + transform_us,
        op_by_op_us=alone_us,
        transform_cost_total=transform_us,
        fused_ops=tuple(
            step.covers for step, a in zip(steps, solution.alternatives, strict=True) if a.payload.kind
        ),
        exact=solution.exact,
        refused=tuple(choices.refused),
        policy=policy,
        digest=digest.hexdigest()[:16],
        block=digest_of(block),
    )


def _step(block: PlacedBlock, choice: Choice) -> PlannedStep:
    placed = [block.ops[place] for place in sorted(choice.covers)]
    return PlannedStep(
        covers=tuple(each.written.name for each in placed),
        op=choice.op.name if choice.op is not None else placed[0].written.op,
        kernel=choice.kernel,
        fusion=choice.kind,
        expected_us=choice.cost_us,
        transforms=tuple(map(str, choice.selection.transforms)) if choice.selection is not None else (),
        why=choice.selection.why if choice.selection is not None else "",
    )


def _value_names(block: PlacedBlock) -> list[str]:
    names = [f"weight {place}" for place in range(len(block.values))]
    for place, value in enumerate(block.inputs):
        names[value] = f"input {place}"
    for op in block.ops:
        for output, value in enumerate(op.outputs):
            names[value] = op.written.name if len(op.outputs) == 1 else f"{op.written.name}[{output}]"
    return names


def _text(form: TensorFormat) -> str:
    return f"{form.dtype} {form.strides}"


def digest_of(block: PlacedBlock) -> str:
    """Equal for blocks of the same ops with arguments and weights of the same shapes, dtypes and strides."""
    produced = {value for op in block.ops for value in op.outputs}
    values = [
        (tuple(t.shape), format_of(t), constant is not None, t.requires_grad, str(t.device))
        for place, (t, constant) in enumerate(block.values)
        if place not in produced
    ]
    ops = [
        (op.written.op, repr(op.args), repr(sorted(op.kwargs.items())), sorted(op.after)) for op in block.ops
    ]
    return hashlib.sha256(repr((ops, values, block.inputs, block.outputs)).encode()).hexdigest()[:16]


def render(record: PlanRecord) -> str:
    """The plan as a table: a line a step, its price, and what it is made of."""
    gain = record.op_by_op_us / record.expected_us if record.expected_us else 1.0
    lines = [
        f"{len(record.steps)} steps, {record.expected_us:.1f} us expected, {gain:.2f} times as fast as op by "
        f"op ({'exact' if record.exact else 'beam'}), transforms {record.transform_cost_total:.1f} us"
    ]
    width = max(len(step.kernel or step.op) for step in record.steps)
    for step in record.steps:
        fused = f"{step.fusion}: " if step.fusion else ""
        name = f"{step.kernel or step.op:<{width}}"
        lines.append(f"  {name}  {step.expected_us:8.1f} us  {fused}{', '.join(step.covers)}")
    lines += [f"  {c.value}: {c.before} -> {c.after}, {c.cost_us:.1f} us" for c in record.conversions]
    lines += [f"  not {r.kind} of {', '.join(r.covers)}: {r.why}" for r in record.refused]
    if record.measured_us:
        timed = ", ".join(f"{name} {us:.1f}" for name, us in record.measured_us.items())
        lines.append(f"  measured, us: {timed}")
    return "\n".join(lines)


def argument_key(leaf: Any) -> Any:
    """What tells an argument of a planned block from one that needs another plan."""
    if isinstance(leaf, Tensor):
        strides = None if leaf.is_contiguous() else leaf.stride()
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad, strides
    return leaf.__class__, repr(leaf) if isinstance(leaf, float) else leaf  # a NaN equals none, -0.0 is 0.0


def scope_key(state: DispatchState, device: LocalDevice, bits: int) -> Any:
    """What tells plans of one context from those of another, beside the state of the process."""
    scope = SCOPE.get()
    autocast = torch.get_autocast_dtype(device.device.type) if bits & AUTOCAST else None
    return None if scope is None else scope.policy.digest, state.agreed_terms, autocast
