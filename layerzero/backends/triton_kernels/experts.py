"""The experts of a mixture over quantized weights: two launches for all experts, however many rows each has.

Rows are sorted by expert; a program has a tile of one expert's rows and of its weight's columns, and finds
its expert by where that one's rows begin, so that experts without rows cost nothing. The first launch
makes the hidden rows, gate and value in one program, the second one writes each answer to a place of its own;
they are added afterwards in the order of choices. The host reads nothing.
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.paged_rows import find_tile
from layerzero.backends.triton_kernels.products import PackedWeight, even_rows, multiply_tile
from layerzero.ops.linear.experts import all_choices


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "swiglu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "geglu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "geglu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = tl.where(x < 0.0, 0.0, x)
    return y


@triton.jit(do_not_specialize=["experts"])
def _grouped(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, order_ptr, starts_ptr, scores_ptr, out_ptr,
    experts, choices, width, gate, value, x_row, codes_row, scale_row, codes_step, scale_step, second_step,
    ACTIVATION: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, PACKED: tl.constexpr, FOLDED: tl.constexpr, ZERO: tl.constexpr,
    SECOND: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    low, begin, count, first = find_tile(starts_ptr, tl.program_id(1), experts, 0, BM)
    if first >= count:
        return
    expert = low.to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    of_expert = first + tl.arange(0, BM)
    is_column, is_line = columns < width, of_expert < count
    places = begin + of_expert
    choice = tl.load(order_ptr + places, mask=is_line, other=0)
    # Hidden rows lie in the order of experts, what goes in and comes out in that of the rows.
    lines = places if ACTIVATION == "" else choice // choices
    codes_ptr += expert * codes_step
    scale_ptr += expert * scale_step
    if ZERO:
        zero_ptr += expert * scale_step
    if SECOND:
        second_ptr += expert * second_step
    score = tl.full((BM,), 1.0, tl.float32)
    if scores_ptr is not None:
        score = tl.load(scores_ptr + choice, mask=is_line, other=0.0)
    sums = multiply_tile(
        x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, gate + columns, lines, is_column,
        is_line, 0, x_row, codes_row, scale_row,
        INNER, GROUP, BLOCK, KIND, PACKED, FOLDED, ZERO, SECOND, 1, ASM, BN, BM, BK,
    ) * score[None, :]  # fmt: skip
    target = choice
    if ACTIVATION != "":
        values = multiply_tile(
            x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, value + columns, lines, is_column,
            is_line, 0, x_row, codes_row, scale_row,
            INNER, GROUP, BLOCK, KIND, PACKED, FOLDED, ZERO, SECOND, 1, ASM, BN, BM, BK,
        ) * score[None, :]  # fmt: skip
        sums = _activate(sums, ACTIVATION) * values
        target = places
    tl.store(
        out_ptr + target[None, :] * width + columns[:, None], sums.to(out_ptr.dtype.element_ty),
        mask=is_column[:, None] & is_line[None, :],
    )  # fmt: skip


def _multiply(
    x: Tensor, operand: PackedWeight, routes: tuple[Tensor, Tensor], scores: Tensor | None, out: Tensor,
    halves: tuple[int, int], activation: str, choices: int,
) -> None:  # fmt: skip
    """One launch: rows `x` to `out` through the weights that they chose; see `_grouped`."""
    order, starts = routes
    weight, scale, _, second, _ = operand.parts
    experts, width = starts.shape[0] - 1, out.shape[1]
    cut = operand.cut(triton.cdiv(order.shape[0], experts))
    columns = min(cut.columns, 64) if activation else cut.columns  # two sums at once
    steps = (0 if part is None or part.dim() == 0 else part.stride(0) for part in (weight, scale, second))
    _grouped[(triton.cdiv(width, columns), order.shape[0] // cut.rows + experts)](
        x, *operand.parts, order, starts, scores, out, experts, choices, width, *halves, x.stride(0),
        *operand.steps, *steps, ACTIVATION=activation, BN=columns, BM=cut.rows, BK=cut.inner,
        **operand.constants, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip


def fused_experts(
    x: Tensor, experts: Tensor, scores: Tensor, w_up: Tensor, w_down: Tensor, up_scale: Tensor,
    down_scale: Tensor, activation: str, gate: str, weighed: str, first_expert: int, shared: int,
    inputs: str, format: str | None, up_zero: Tensor | None, down_zero: Tensor | None,
    up_second: Tensor | None, down_second: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    """Answers of all experts, added in float32 in the order of choices; `inputs` is "float" alone."""
    rows, count, hidden = even_rows(x), w_up.shape[0], w_up.shape[1] // 2
    chosen, weights = all_choices(experts, scores.float(), count, first_expert, shared)
    choices, score = chosen.shape[1], weights.flatten().contiguous()
    # Choices that have no weight here come last, behind every expert's rows.
    ordered, order = torch.where(chosen < 0, count, chosen).flatten().sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(count + 1, device=x.device))
    routes, halves = (order, starts), (0, hidden) if gate == "first" else (hidden, 0)
    hidden_rows = torch.empty((order.shape[0], hidden), dtype=x.dtype, device=x.device)
    up = PackedWeight.of(x, w_up, up_scale, up_zero, up_second, format, block_size)
    down = PackedWeight.of(x, w_down, down_scale, down_zero, down_second, format, block_size)
    before, after = (score, None) if weighed == "inputs" else (None, score)
    _multiply(rows, up, routes, before, hidden_rows, halves, activation, choices)
    answers = torch.zeros((order.shape[0], x.shape[-1]), dtype=torch.float32, device=x.device)
    _multiply(hidden_rows, down, routes, after, answers, (0, 0), "", choices)
    return answers.view(-1, choices, x.shape[-1]).sum(1).to(x.dtype).view(x.shape)
