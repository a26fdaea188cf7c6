"""Any valid attention call, any kernel that accepts it: the float64 reference, within tolerance."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.backends import availability, load_builtin
from layerzero.ops import table as ops_table
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import rejections
from layerzero.spec.tolerances import mismatches
from tests.backends import cases

ATTENTION = ops_table.get("attention")
KERNELS = [k for k in load_builtin() if k.op == "attention" and not availability(k)]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    batch, heads_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sq, sk = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    size = draw(st.sampled_from([1, 8, 20, 32, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    heads = heads_k * group
    keywords: dict[str, Any] = {}
    mask = draw(st.sampled_from(["none", "none", "causal", "bool", "float", "window"]))
    if mask == "causal":
        keywords["is_causal"] = True
    elif mask == "bool":
        keywords["attn_mask"] = torch.rand(sq, sk, generator=generator) > 0.3
    elif mask == "float":
        keywords["attn_mask"] = rand(batch, 1, sq, sk)
    elif mask == "window":
        keywords["window"] = (draw(st.integers(-1, 6)), draw(st.integers(-1, 6)))
    if draw(st.booleans()):
        keywords["scale"] = draw(st.floats(0.05, 1.5))
    if draw(st.integers(0, 4)) == 0:
        keywords["softcap"] = draw(st.floats(1.0, 30.0))
    if draw(st.integers(0, 4)) == 0:
        keywords["alibi_slopes"] = torch.rand(heads, generator=generator)
    shapes = ((batch, heads, sq, size), (batch, heads_k, sk, size), (batch, heads_k, sk, size))
    tensors = [rand(*shape) for shape in shapes]
    if draw(st.booleans()):
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
        keywords["layout"] = "BSHD"
        if draw(st.booleans()):
            tensors = [t.transpose(1, 2) for t in tensors]
            keywords["layout"] = "BHSD"
    return ATTENTION.build(*tensors, **keywords)[1]


def rounded(args: tuple[Any, ...]) -> torch.Tensor:
    """What rounding costs in the operands' dtype: the baseline, whose scores are summed in another order.

    In float64 the baseline is the truth itself, and would say that no order of a sum differs from another.
    """
    q, k, *rest = args
    reversed_sums = (q.flip(-1), k.flip(-1), *rest) if q.dtype == torch.float64 else args
    return cases.baseline(ATTENTION, reversed_sums)[0].to(q.dtype)


@given(calls())
def test_every_accepting_kernel_agrees_with_float64(args: tuple[Any, ...]) -> None:
    """Whatever the flags, layout and sizes, a kernel that accepts a call computes it."""
    request = ATTENTION.check(args)
    truth, base = cases.truth(ATTENTION, args)[0], rounded(args)
    accepting = [k for k in KERNELS if not rejections(k, request, probe("cpu"))]
    assert "reference.attention" in {k.id for k in accepting}
    for kernel in accepting:
        out = kernel.load()(*args)
        problems = mismatches(out, truth, base, softcap="softcap" in request.features)
        assert not problems, f"{kernel.id} on {request.dims} {sorted(request.features)}: {problems}"
