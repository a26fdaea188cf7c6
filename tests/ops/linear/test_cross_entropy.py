"""cross_entropy against float64 written out: reductions, ignored rows, smoothing, weights, bad input."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.ops.linear.cross_entropy import CROSS_ENTROPY
from tests.ops.calls import assert_same, call


def oracle(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smoothing: float, reduction: str
) -> Tensor:
    """Row by row, class by class, in float64."""
    rows, ids = logits.double().reshape(-1, logits.shape[-1]), target.reshape(-1).tolist()
    scale = torch.ones(rows.shape[1]).double() if weight is None else weight.double()
    logs = rows - rows.exp().sum(-1, keepdim=True).log()
    losses, mass = [], 0.0
    for log, label in zip(logs, ids, strict=True):
        if label == ignore:
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        smooth = -(log * scale).sum() * smoothing / len(log)
        losses.append(-(1 - smoothing) * log[label] * scale[label] + smooth)
        mass += float(scale[label])
    out = torch.stack(losses)
    if reduction == "none":
        return out.reshape(target.shape)
    return out.sum() / (mass if reduction == "mean" else 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_the_loss_matches_float64(
    dtype: torch.dtype, reduction: str, smoothing: float, weighted: bool, ignore: int
) -> None:
    """Every combination of options, rounded to the output dtype."""
    logits = torch.randn(2, 5, 11).to(dtype)
    target = torch.randint(11, (2, 5), dtype=torch.int32)
    target[0, :2] = ignore
    weight = torch.rand(11).to(dtype) if weighted else None
    options = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": reduction}
    got = call(CROSS_ENTROPY, logits, target, weight=weight, **options)
    wanted = oracle(logits, target, weight, ignore, smoothing, reduction)
    torch.testing.assert_close(got, wanted.to(dtype))


def test_large_logits_do_not_overflow() -> None:
    """The exponential is taken of differences: 60000 in float16 is a number like others."""
    logits = torch.tensor([[60000.0, 0.0]], dtype=torch.float16)
    assert call(CROSS_ENTROPY, logits, torch.tensor([0])).item() == 0.0


def test_nothing_that_counts_has_no_mean() -> None:
    """All rows ignored: mean NaN, sum 0; the same without any row."""
    for logits, target in (
        (torch.ones(2, 3), torch.tensor([-100, -100])),
        (torch.ones(0, 3), torch.empty(0).long()),
    ):
        assert math.isnan(call(CROSS_ENTROPY, logits, target).item())
        assert call(CROSS_ENTROPY, logits, target, reduction="sum").item() == 0.0
        assert call(CROSS_ENTROPY, logits, target, reduction="none").tolist() == [0.0] * len(target)


def test_nan_propagates() -> None:
    """A row with NaN has a loss of NaN, its neighbour has not."""
    logits = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    out = call(CROSS_ENTROPY, logits, torch.tensor([0, 0]), reduction="none")
    assert out[0].isnan() and out[1].isfinite()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_right(reduction: str) -> None:
    """Analytic and numeric gradients agree in float64, smoothing, weights and ignored rows included."""
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64)
    target = torch.tensor([0, 4, -100, 2])
    options: dict[str, Any] = {"weight": weight, "label_smoothing": 0.2, "reduction": reduction}
    assert torch.autograd.gradcheck(lambda x: call(CROSS_ENTROPY, x, target, **options), (logits,))


def test_only_losses_a_row_share_a_launch() -> None:
    """reduction="none" joins rows of any leading shape; a mean or a sum runs alone."""
    weight = torch.rand(7)
    calls = [
        CROSS_ENTROPY.build(torch.randn(*s, 7), torch.randint(7, s), weight=weight, reduction="none")[1]
        for s in ((3,), (1,), (2, 2), ())
    ]
    (merged,) = assert_same(CROSS_ENTROPY, calls)
    assert merged[0].shape == (9, 7) and merged[1].shape == (9,)
    assert CROSS_ENTROPY.batching is not None
    for reduction in ("mean", "sum"):
        args = CROSS_ENTROPY.build(torch.ones(2, 7), torch.zeros(2).long(), reduction=reduction)[1]
        assert CROSS_ENTROPY.batching.batch_key(args) is None


L, T = torch.ones(2, 3), torch.tensor([0, 1])
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((None, T), {}, TypeError, "logits needs a torch.Tensor"),
    ((L.long(), T), {}, TypeError, "logits needs a floating point dtype"),
    ((torch.ones(2, 0), T), {}, ValueError, "logits needs a last axis of at least 1"),
    ((L, None), {}, TypeError, "target needs a torch.Tensor"),
    ((L, L), {}, TypeError, "target needs class ids, int32 or int64; class probabilities are not taken"),
    ((L, T.bool()), {}, TypeError, "target needs dtype int32 or int64, got bool"),
    ((L, T[:1]), {}, ValueError, r"target needs shape \(2,\) like logits without its last axis, got \(1,\)"),
    ((L, T.to("meta")), {}, ValueError, "target needs to be on cpu"),
    ((L, T + 2), {}, ValueError, r"target needs ids in \[0, 3\) \(logits' classes\), got 3 at position 1"),
    ((L, T - 1), {}, ValueError, "got -1 at position 0"),
    ((L, T), {"weight": torch.ones(2)}, ValueError, "weight needs 3 elements"),
    ((L, T), {"weight": torch.ones(3).requires_grad_()}, ValueError, "weight needs to require no grad"),
    ((L, T), {"ignore_index": 0.5}, TypeError, "ignore_index needs an int"),
    ((L, T), {"label_smoothing": 1.5}, ValueError, "label_smoothing needs a finite number in"),
    ((L, T), {"label_smoothing": "0"}, TypeError, "label_smoothing needs a number"),
    ((L, T), {"reduction": "avg"}, ValueError, "reduction needs one of mean, sum, none"),
    ((L, T), {"reduction": None}, TypeError, "reduction needs one of mean, sum, none"),
]


@pytest.mark.parametrize(("operands", "options", "error", "message"), BAD)
def test_bad_input_is_named(
    operands: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(CROSS_ENTROPY, *operands, **options)


def test_the_request_names_what_is_extra() -> None:
    """label_smoothing and class_weights are features."""
    args = CROSS_ENTROPY.build(L, T, weight=torch.ones(3), label_smoothing=0.1)[1]
    request = CROSS_ENTROPY.check(args)
    assert request.features == {"label_smoothing", "class_weights"}
    assert request.dims == {"N": 2, "V": 3}
    assert CROSS_ENTROPY.check(CROSS_ENTROPY.build(L, T)[1]).features == frozenset()
