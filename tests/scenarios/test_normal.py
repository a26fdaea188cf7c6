"""Ordinary use, one test for each scenario of the ledger that no other test states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops import table as ops_table
from layerzero.ops.op import Op
from layerzero.runtime import current
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import Plan, signature_of
from layerzero.spec.reasons import Reason
from tests.kernels import device, kernel

ATTENTION = ops_table.get("attention")


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own: nothing loads behind it, and memory that others take decides nothing."""
    with lz.start(lz.Settings(warm="off", workspace_limit_bytes=1 << 30)):
        yield


def decisions() -> float:
    """How many choices the runtime has made."""
    return current().counters.total("selections")


def test_the_second_call_decides_nothing() -> None:
    """NO-001: a call finds its kernel; the same call again is a hit, and so is its record."""
    q = torch.randn(4, 8, 512, 64, dtype=torch.float16)
    before = decisions()
    first = lz.select("attention", q, q, q)
    assert decisions() == before + 1
    second = lz.select("attention", q, q, q)
    assert decisions() == before + 1
    assert first.kernel == second.kernel and first.trace == second.trace


def test_causal_is_a_stated_feature() -> None:
    """NO-002: every attention kernel says whether it masks causally, and one that does not is refused."""
    q = torch.randn(1, 2, 4, 8)
    assert "causal" in lz.select("attention", q, q, q, is_causal=True).request.features
    plain = {k.id for k in lz.list_kernels("attention") if "causal" not in k.capability.features}
    assert plain == {"xformers.attention.triton_splitk"}  # written for one query token
    own = device([kernel("plain.attention", launch_us=0.1, features=frozenset()), kernel("any.attention")])
    full = ATTENTION.build(q, q, q, is_causal=True)[1]
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    assert record.kernel == "any.attention"
    assert [r.reason for r in record.candidate("plain.attention").rejected] == [Reason.CAUSAL_UNSUPPORTED]


def test_sixteen_identical_calls_are_one_decision() -> None:
    """NO-004: the first of sixteen calls decides, fifteen are hits."""
    x = torch.randn(3, 64)
    before = decisions()
    for _ in range(16):
        layerzero.sync.rms_norm(x)
    assert decisions() == before + 1


def test_a_batch_of_identical_requests_costs_one_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO-004: sixteen equal requests in one call are looked up once, others once each, in their order."""
    looked_up: list[object] = []
    plan = LocalDevice.plan

    def counting(own: LocalDevice, op: Op, signature: object, *rest: Any) -> Plan:
        looked_up.append(signature)
        return plan(own, op, signature, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalDevice, "plan", counting)
    same = [{"x": torch.randn(3, 64)} for _ in range(16)]
    before = decisions()
    first = lz.select_batch("rms_norm", same)
    assert decisions() == before + 1 and len(looked_up) == 1
    assert len(first) == 16 and all(record is first[0] for record in first)
    other = {"x": torch.randn(3, 64), "weight": torch.randn(64)}
    mixed = lz.select_batch("rms_norm", [other, same[0], other], backend="reference")
    assert [r.kernel for r in mixed] == ["reference.rms_norm"] * 3 and len(looked_up) == 3
    assert mixed[0] is mixed[2] and "no_weight" in mixed[1].request.features
    assert lz.select_batch("rms_norm", []) == []
    with pytest.raises(TypeError, match=r"x needs a torch\.Tensor"):
        lz.select_batch("rms_norm", [{"x": None}])


def test_grouped_heads_need_the_feature() -> None:
    """NO-010: 32 query heads over 8 key heads go to kernels that take groups; others say why not."""
    q, k = torch.randn(1, 32, 4, 16), torch.randn(1, 8, 4, 16)
    selection = lz.select("attention", q, k, k)
    assert selection.request.dims["G"] == 4
    refused = lz.select("attention", q, k, k).candidate("torch.attention.sdpa_efficient").rejected
    assert Reason.GQA_UNSUPPORTED in {r.reason for r in refused}
    wide = k.repeat_interleave(4, dim=1)
    torch.testing.assert_close(
        layerzero.sync.attention(q, k, k), layerzero.sync.attention(q, wide, wide), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("size", [32, 256])
def test_head_sizes_32_and_256(size: int) -> None:
    """NO-016 and NO-017: small and large heads give what the reference gives, in every kernel."""
    q = torch.randn(1, 2, 5, size)
    truth = layerzero.sync.attention(q, q, q, backend="reference.attention")
    takers = lz.select("attention", q, q, q).order
    assert len(takers) >= 3
    for name in takers:
        out = layerzero.sync.attention(q, q, q, backend=name)
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-5)
