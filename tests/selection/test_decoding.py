"""Kernels that take no codes serve calls over codes: numbers are made first, priced, and said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.ops import kv_formats
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args
from layerzero.selection.record import render
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.backends import cases
from tests.kernels import device, kernel

CODES = tuple(kv_formats.CODE_FEATURES)
NUMBERS = frozenset({"causal", "gqa", "prefill", "lse", "scale", "scale_not_positive"})


def numbers_only(op: str, seen: list[Args]) -> Kernel:
    """A kernel of plain torch that reads numbers alone, and notes what it is given."""

    def body(*args: Any) -> Any:
        seen.append(args)
        return ops_table.get(op).reference(*args)

    layouts = {"attention": {"BHSD", "BSHD"}, "paged_attention": {"NHD", "HND"}}.get(op, set())
    return kernel(f"a.{op}", body, op=op, features=NUMBERS, layouts=frozenset(layouts), mixed_dtypes=True)


@pytest.mark.parametrize("op", ["paged_attention", "mla_attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_codes_are_made_numbers_for_a_kernel_without_codes(op: str, dtype: torch.dtype) -> None:
    """Only the pages that tables name, in q's dtype; the record says which format, and what it costs."""
    table = 3 if op == "paged_attention" else 4
    grain = [f"kv_scale_per_{g}" for g in (("head", "token") if op == "paged_attention" else ("token",))]
    for codes, granularity in [(c, None) for c in CODES] + [(CODES[0], g) for g in grain]:
        for more in ((), ("prefill",), ("hnd",)) if op == "paged_attention" else ((), ("prefill",)):
            case = cases.Case(op, (codes, *([granularity] if granularity else []), *more, "causal"))
            args = cases.call(case, dtype)
            pool = args[table - 1]
            size = pool.shape[2 if "hnd" in more else 1]
            behind = torch.arange(args[table].shape[1]) * size >= args[table + 1][:, None]
            args = (*args[:table], args[table].masked_fill(behind, -7), *args[table + 1 :])
            seen: list[Args] = []
            own = device([numbers_only(op, seen)])
            out, plan = own.launch_planned(ops_table.get(op), args)
            near: dict[str, Any] = (
                {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
            )
            torch.testing.assert_close(out, ops_table.get(op).reference(*args), **near)
            chosen = plan.selection_for_request()
            (transform,) = chosen.transforms
            wanted = f"dequantize {codes.removeprefix('kv_')} -> {str(dtype).removeprefix('torch.')}"
            assert str(transform) == wanted and wanted in render(chosen)
            assert transform.cost_us > 0 and transform.size > 0
            pools = seen[0][table - 2 : table]
            assert {pool.dtype for pool in pools} == {dtype}


@pytest.mark.parametrize("op", ["attention", "ragged_attention"])
@pytest.mark.parametrize("coded_queries", [True, False])
def test_dense_codes_are_made_numbers_for_a_kernel_without_codes(op: str, coded_queries: bool) -> None:
    """Queries too, where they are codes: the result is bfloat16 then, else in q's dtype."""
    shape = (2, 2, 5, 8) if op == "attention" else (10, 2, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    scale, code = torch.tensor(0.01), torch.float8_e4m3fn
    named = {"k_scale": scale, "v_scale": scale} | ({"q_scale": scale} if coded_queries else {})
    operands = [(q / scale).to(code) if coded_queries else q, (k / scale).to(code), (v / scale).to(code)]
    offsets = [] if op == "attention" else [torch.tensor([0, 4, 10])]
    full = ops_table.get(op).build(*operands, *offsets, **named)[1]
    seen: list[Args] = []
    out, plan = device([numbers_only(op, seen)]).launch_planned(ops_table.get(op), full)
    expected = ops_table.get(op).reference(*full)
    assert out.dtype == expected.dtype == (torch.bfloat16 if coded_queries else torch.float32)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert [t.kind for t in plan.selection_for_request().transforms] == ["dequantize"]
    assert {t.dtype for t in seen[0][:3]} == {out.dtype}


def test_strict_refuses_numbers_made_of_codes() -> None:
    """E6.12: with strict no codes become numbers on the way; the reason names format and transform."""
    args = cases.call(cases.Case("paged_attention", (CODES[0],)), torch.float32)
    own = device([numbers_only("paged_attention", [])], Settings(strict=True))
    with pytest.raises(NoKernelFoundError, match="dequantize") as caught:
        own.launch(ops_table.get("paged_attention"), args)
    reasons = {r.reason for c in caught.value.trace for r in c.rejected}
    assert {Reason.KV_DTYPE_MISMATCH, Reason.STRICT_NEEDS_TRANSFORM} <= reasons


def test_a_kernel_that_reads_codes_is_priced_for_fewer_bytes() -> None:
    """One byte an element, and no transform: cheaper than the same kernel after numbers were made."""
    op = ops_table.get("paged_attention")
    args = cases.call(cases.Case("paged_attention", (CODES[0],), {"N": 8}), torch.bfloat16)
    spec = op.check(args)
    plain = spec.replace(features=spec.features - {CODES[0], "kv_scale_per_tensor"})
    assert op.work(spec).bytes < op.work(plain).bytes
    features = NUMBERS | set(CODES) | set(kv_formats.SCALE_FEATURES)
    layouts = frozenset({"NHD"})
    reads = kernel("b.codes", op.reference, op="paged_attention", features=features, layouts=layouts)
    own = device([numbers_only("paged_attention", []), reads])
    assert own.launch_planned(op, args)[1].selection_for_request().kernel == "b.codes"
