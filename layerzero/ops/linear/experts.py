"""The experts of a mixture, with quantized or plain weights: fused_experts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero.formats.table import format_of
from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe
from layerzero.ops.linear.mlp import GATES, activate
from layerzero.ops.op import Args, define_op, output_like
from layerzero.ops.quantize.operands import inputs_feature, need_codes, need_part_values, weight_features
from layerzero.ops.quantize.quantize import numbers
from layerzero.ops.quantize.quantized_linear import code_bits, rounded_rows
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate

GATE_FIRST = ("first", "second")
WEIGHED = ("outputs", "inputs")


class ExpertsArgs(NamedTuple):
    """What kernels of `fused_experts` take."""

    x: Tensor
    experts: Tensor
    scores: Tensor
    w_up: Tensor
    w_down: Tensor
    up_scale: Tensor | None
    down_scale: Tensor | None
    activation: str
    gate: str
    weighed: str
    first_expert: int
    shared: int
    inputs: str
    format: str | None
    up_zero_point: Tensor | None
    down_zero_point: Tensor | None
    up_tensor_scale: Tensor | None
    down_tensor_scale: Tensor | None
    block_size: int

    def parts(self, end: str) -> tuple[Tensor | None, ...]:
        """The scale, zero point and second scale of the weight `w_up` or `w_down`."""
        return tuple(getattr(self, name) for name in _part_names(end))


@op_signature()
def fused_experts(
    x: Tensor,
    experts: IndexTensor,
    scores: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    *,
    activation: str = "swiglu",
    gate: str = "first",
    weighed: str = "outputs",
    first_expert: int = 0,
    shared: int = 0,
    inputs: str = "float",
    format: str | None = None,
    up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    up_tensor_scale: Tensor | None = None,
    down_tensor_scale: Tensor | None = None,
    block_size: int = 0,
) -> SignedCall:
    """Send each row of `x` to the experts chosen for it and add their answers, weighed by their scores.

    Args: x (..., C), any float dtype; experts (..., T) int32 or int64 and scores (..., T) float, as
        `select_experts` gives them; w_up (E, 2F, C) and w_down (E, C, F) of x's kind without scales, or codes
        with up_scale and down_scale as `quantize` gives them for each expert (E, ...), with zero points,
        tensor scales (E,) or (), format, block_size and inputs as in `quantized_linear`. gate says which F
        rows of an expert's 2F are the gate's; activation is a gated kind of `mlp`; weighed says whether a
        score multiplies the expert's answer or what it gets. The first weight is that of expert
        `first_expert`; experts without a weight here, as -1, add nothing. The last `shared` weights are no
        routed experts: every row goes through each, with weight 1.
    Returns: x's shape and dtype; answers are added in float32, in the order of experts' columns.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    Source: arXiv 2401.04088, section 2.1; shared experts: arXiv 2412.19437, section 2.1.2.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    call = ExpertsArgs._make(args)
    x, experts = call.x, call.experts
    checks.need_rows("x", x)
    checks.need_index("experts", experts)
    checks.need_rows("scores", call.scores)
    chosen = experts.shape[-1] if experts.dim() else 0
    for name, tensor in (("experts", experts), ("scores", call.scores)):
        checks.need_shape(name, tensor, (*x.shape[:-1], chosen), ", for x's rows and experts' last axis")
    checks.need_choice("activation", call.activation, GATES)
    checks.need_choice("gate", call.gate, GATE_FIRST)
    checks.need_choice("weighed", call.weighed, WEIGHED)
    features = {f"act_{call.activation}"}
    if (call.up_scale is None) != (call.down_scale is None):
        raise ValueError("down_scale needs to be given where up_scale is, and only there")
    sizes: list[int] = []
    up, down = (_weight(call, end, features, sizes) for end in ("up", "down"))
    width, hidden, count = x.shape[-1], down[2], up[0]
    if hidden == 0 or down[:2] != (count, width):
        raise ValueError(f"w_down needs numbers of shape ({count}, {width}, F), got {down}")
    if up != (count, 2 * hidden, width):
        raise ValueError(f"w_up needs numbers of shape {(count, 2 * hidden, width)}, (E, 2F, C), got {up}")
    checks.need_int("first_expert", call.first_expert, low=0)
    checks.need_int("shared", call.shared, low=0, high=count)
    if call.up_scale is not None:
        features.add(inputs_feature(call.inputs, format_of(call.w_up.dtype, call.format, "w_up")))
    elif checks.need_choice("inputs", call.inputs, ("float",)):
        features.add("weights_plain")
    features |= {"gate_second"} if call.gate == "second" else set()
    features |= {"weighed_inputs"} if call.weighed == "inputs" else set()
    features |= {"local_experts"} if call.first_expert else set()
    features |= {"shared_experts"} if call.shared else set()
    others = {name: value for name, value in call._asdict().items() if isinstance(value, Tensor)}
    del others["x"]
    checks.need_same_device("x", x, **others)
    dims = {"N": x.numel() // width, "C": width, "F": hidden, "E": count, "T": chosen, "S": math.gcd(*sizes)}
    return describe("fused_experts", [x], dims, features, typed=[x], aligned=[call.w_up, call.w_down])


def _part_names(end: str) -> tuple[str, str, str]:
    return f"{end}_scale", f"{end}_zero_point", f"{end}_tensor_scale"


def _weight(call: ExpertsArgs, end: str, features: set[str], sizes: list[int]) -> tuple[int, ...]:
    """The shape of a weight's numbers; its features and the size of its groups are added to the others'."""
    name, weight = f"w_{end}", call.w_up if end == "up" else call.w_down
    scale, zero_point, second = call.parts(end)
    if scale is None:
        checks.need_weight(name, weight, rank=3)
        others = {other: getattr(call, other) for other in (*_part_names(end)[1:], "format")}
        for other, value in (others | {"block_size": call.block_size or None}).items():
            if value is not None:
                raise ValueError(f"{other} needs {end}_scale beside it, got none")
        return tuple(weight.shape)
    form, shape = need_codes(name, weight, call.format, rank=3)
    parts = (scale, zero_point, second, call.block_size)
    part_features, size = weight_features(form, shape, *parts, _part_names(end))
    features |= part_features
    sizes.append(size)
    return shape


def _validate_values(args: Args) -> Args:
    """Scales and zero points of both weights, the first time that they come."""
    call = ExpertsArgs._make(args)
    for end, weight in (("up", call.w_up), ("down", call.w_down)):
        if call.parts(end)[0] is not None:
            need_part_values(_part_names(end), call.parts(end), format_of(weight.dtype, call.format))
    return args


def fused_experts_reference(*args: Any) -> Tensor:
    """Expert by expert over the rows that chose it, in float32 at least.

    Args: those of `ExpertsArgs`.
    """
    call = ExpertsArgs._make(args)
    x, form, block_size = call.x, call.format, call.block_size
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.reshape(-1, x.shape[-1]).to(kind)
    count = call.w_up.shape[0]
    chosen, weights = all_choices(call.experts, call.scores, count, call.first_expert, call.shared)
    weights = weights.to(kind)
    answers = rows.new_zeros(*chosen.shape, rows.shape[1])

    def product(part: Tensor, end: str, expert: int) -> Tensor:
        weight = (call.w_up if end == "up" else call.w_down)[expert]
        scale, zero, second = (of_expert(each, expert) for each in call.parts(end))
        if scale is None:
            return F.linear(part, weight.to(kind))
        sent = rounded_rows(part, call.inputs, weight.dtype, form, block_size)
        return F.linear(sent.to(kind), numbers(weight, scale, form, zero, second, block_size, kind))

    for expert in range(count):
        row, place = (chosen == expert).nonzero(as_tuple=True)
        if len(row) == 0:
            continue
        score = weights[row, place].unsqueeze(-1)
        up = product(rows[row] * score if call.weighed == "inputs" else rows[row], "up", expert)
        hidden = activate(up if call.gate == "first" else up.roll(up.shape[-1] // 2, -1), call.activation)
        down = product(hidden.to(kind), "down", expert).to(kind)  # autocast rounds products
        answers = answers.index_put((row, place), down if call.weighed == "inputs" else down * score)
    return answers.sum(1).to(x.dtype).view(x.shape)


def of_expert(tensor: Tensor | None, expert: int) -> Tensor | None:
    """An expert's own part of a scale or zero point; what is one for all stays."""
    return tensor if tensor is None or tensor.dim() == 0 else tensor[expert]


def all_choices(
    experts: Tensor, scores: Tensor, count: int, first_expert: int, shared: int
) -> tuple[Tensor, Tensor]:
    """(N, T + shared): the weight that each row goes through, -1 where it is not here, and its score."""
    chosen = experts.reshape(-1, experts.shape[-1]).long() - first_expert
    chosen = torch.where((chosen < 0) | (chosen >= count - shared), -1, chosen)
    weights = scores.reshape(chosen.shape)
    if shared:
        trailing = torch.arange(count - shared, count, device=chosen.device).expand(len(chosen), shared)
        chosen = torch.cat((chosen, trailing), 1)
        weights = torch.cat((weights, weights.new_ones(len(weights), shared)), 1)
    return chosen, weights


def _work(spec: CallSpec) -> WorkEstimate:
    """Three products for each row and chosen expert; the weights of the experts that may be chosen move."""
    n, c, f, t = (spec.dim(name) for name in "NCFT")
    touched, element = min(spec.dim("E"), n * t), checks.dtype_bytes(spec.dtype)
    plain = "weights_plain" in spec.features
    moved = 2 * n * c * element + 3 * touched * c * f * (element if plain else code_bits(spec.features) / 8)
    return WorkEstimate(flops=6.0 * n * t * c * f, bytes=float(moved))


FUSED_EXPERTS = define_op(
    build=fused_experts,
    check=_check,
    reference=fused_experts_reference,
    outputs=output_like(0),
    work=_work,
    operands=(0,),
    uncopied_operands=(3, 4),
    exact_dims=frozenset({"C", "F", "E", "T", "S"}),
    validate_values=_validate_values,
    batching=RowBatching(row_operands=(0, 1, 2)),
    differentiable=False,
)
