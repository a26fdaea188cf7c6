"""Every kernel that runs here does what it claims: numbers, structure, inputs, gradients, repetition."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero import tolerances
from layerzero.kernel import Kernel, judge
from layerzero.ops import checks, table
from layerzero.ops.op import Args
from tests.backends import cases

IDS = [k.id for k in cases.RUNNABLE]
every_kernel = pytest.mark.parametrize("kernel", cases.RUNNABLE, ids=IDS)


@functools.cache
def loaded(kernel: Kernel) -> Any:
    return kernel.load()


def accepted(kernel: Kernel) -> list[tuple[cases.Case, Args]]:
    """The generated calls that the kernel's capability lets through, in every dtype it claims."""
    op = table.get(kernel.op)
    found = []
    for dtype in cases.dtypes(kernel):
        for case in cases.cases(kernel.op):
            args = cases.call(case, dtype)
            if not judge(kernel, op.check(args), cases.CPU):
                found.append((case, args))
    return found


@pytest.mark.parametrize("kernel", cases.KERNELS, ids=[k.id for k in cases.KERNELS])
def test_a_kernel_runs_here_or_says_why_not(kernel: Kernel) -> None:
    """Kernels for other hardware are named with what they miss."""
    missing = cases.why_not_here(kernel)
    if missing:
        pytest.skip(missing)
    assert callable(loaded(kernel))


@every_kernel
def test_results_are_within_tolerance(kernel: Kernel) -> None:
    """Each claimed feature, pair of features, dtype and size agrees with the float64 reference."""
    op = table.get(kernel.op)
    calls = accepted(kernel)
    assert len(calls) >= 2
    wrong = []
    for case, args in calls:
        with torch.no_grad():
            outs = cases.as_tuple(loaded(kernel)(*args))
            truths, bases = cases.truth(op, args), cases.baseline(op, args)
        got = [(tuple(o.shape), checks.dtype_name(o.dtype)) for o in outs]
        assert got == [(s.shape, s.dtype) for s in op.outputs(args)]
        for index, out in enumerate(outs):
            if not out.is_floating_point():
                if not torch.equal(out, op.reference(*args)):
                    wrong.append(f"{case} {out.dtype}: other tokens")
                continue
            base = bases[index].to(out.dtype)
            for problem in tolerances.disagreements(out, truths[index], base, softcap="softcap" in case.asks):
                wrong.append(f"{case} {args[0].dtype} output {index}: {problem}")
    assert not wrong, "\n".join(wrong[:20])


@every_kernel
def test_every_claimed_feature_is_exercised(kernel: Kernel) -> None:
    """No claim goes untested: the generated calls ask for each feature that the op's kernels can have."""
    op = table.get(kernel.op)
    asked: set[str] = set()
    for _, args in accepted(kernel):
        asked |= op.check(args).features
    by_hand = {"dropout", "mask_grad", "lse_grad"}  # tested below and in test_torch_sdpa.py
    claimed = kernel.capability.features - by_hand
    if kernel.backend == "reference":
        return
    assert claimed <= asked, claimed - asked


@every_kernel
def test_inputs_stay_as_they_were(kernel: Kernel) -> None:
    """No kernel writes what the caller gave it."""
    for case, args in accepted(kernel):
        before = [a.clone() if isinstance(a, Tensor) else a for a in args]
        with torch.no_grad():
            loaded(kernel)(*args)
        for now, then in zip(args, before, strict=True):
            assert not isinstance(now, Tensor) or torch.equal(now, then), str(case)


@every_kernel
def test_repeated_runs_give_the_same_bits(kernel: Kernel) -> None:
    """A kernel that claims to be deterministic is, bitwise."""
    assert kernel.capability.deterministic, "no kernel of the CPU is otherwise"
    for case, args in accepted(kernel):
        with torch.no_grad():
            first = cases.as_tuple(loaded(kernel)(*args))
            for _ in range(3):
                again = cases.as_tuple(loaded(kernel)(*args))
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), str(case)


# Which operands have callers' rows in front; the others belong to all.
_ROWS = {
    "attention": (0, 1, 2), "rms_norm": (0,), "add_rms_norm": (0, 1), "layer_norm": (0,),
    "add_layer_norm": (0, 1), "linear": (0,),
    "mlp": (0,), "embedding": (0,), "rope": (0, 1, 2), "sample": (0,), "sample_topk": (0,),
    "sample_topp": (0,), "cross_entropy": (0, 1),
    "paged_attention": (0, 3, 4), "mla_attention": (0, 1, 4, 5),
}  # fmt: skip


def row_bits_hold(kernel: Kernel, dtype: torch.dtype, dims: dict[str, int], asks: tuple[str, ...]) -> bool:
    """Whether the first rows give the same bits alone and in batches of several sizes."""
    op = kernel.op
    size = "B" if op == "attention" else "N"
    args = cases.call(cases.Case(op, asks, {**dims, size: 67}), dtype)
    if judge(kernel, table.get(op).check(args), cases.CPU):
        return True
    run = loaded(kernel)
    with torch.no_grad():
        full = cases.as_tuple(run(*args))
        for count in (1, 2, 7, 32):
            part = tuple(a[:count] if i in _ROWS[op] else a for i, a in enumerate(args))
            alone = cases.as_tuple(run(*part))
            if not all(torch.equal(a, b[:count]) for a, b in zip(alone, full, strict=True)):
                return False
    return True


WIDTHS = ({"C": 31, "K": 64}, {"C": 384, "K": 384}, {"C": 1536, "K": 384}, {"C": 768, "K": 3072})


@every_kernel
def test_batch_invariance_holds_where_claimed(kernel: Kernel) -> None:
    """A row's bits do not depend on how many rows stand with it, for kernels that promise so."""
    if not kernel.capability.batch_invariant:
        pytest.skip("makes no such promise")
    if kernel.op not in _ROWS:
        pytest.skip("has no rows")
    for dtype in cases.dtypes(kernel):
        for dims in WIDTHS if kernel.op != "attention" else ({}, {"Sq": 33, "Sk": 65, "D": 64}):
            for ask in ((), *((a,) for a in cases._ASKS.get(kernel.op, ()))):
                if "mask" not in str(ask) and ask not in (("seed_per_row",), ("mean",), ("prefill",)):
                    assert row_bits_hold(kernel, dtype, dims, ask), (dtype, dims, ask)


def _weighed(out: Tensor) -> Tensor:
    """A sum in which no two elements count alike: a plain sum of normed rows has no gradient."""
    return (out * torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape)).sum()


@every_kernel
def test_gradients_equal_the_references(kernel: Kernel) -> None:
    """Where a gradient is promised, every floating operand gets the float64 reference's."""
    op = table.get(kernel.op)
    if not kernel.capability.gradient or not op.differentiable:
        pytest.skip("promises no gradient")
    compared = 0
    learned = op.operands if kernel.op != "cross_entropy" else (0,)  # class weights are constants
    for case in cases.cases(kernel.op):
        args = tuple(
            a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() and i in learned else a
            for i, a in enumerate(cases.call(case, torch.float64))
        )
        request = op.check(args)
        if judge(kernel, request.replace(modes=frozenset({"grad"})), cases.CPU):
            continue
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        ours, truths = (
            torch.autograd.grad([_weighed(o) for o in cases.as_tuple(run(*args)) if o.requires_grad], leaves)
            for run in (loaded(kernel), op.reference)
        )
        for mine, true in zip(ours, truths, strict=True):
            torch.testing.assert_close(mine, true)
        compared += len(leaves)
    assert compared or kernel.op == "alibi" or "float64" not in kernel.capability.dtypes
