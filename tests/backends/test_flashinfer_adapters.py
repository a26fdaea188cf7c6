"""FlashInfer's adapters hand over what a call says; its wrappers are played by one that remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.flashinfer import attention, common, mla, planning
from layerzero.backends.flashinfer.sampling import KERNELS as SAMPLERS
from layerzero.ops import table
from layerzero.spec.kernel import rejections
from layerzero.spec.reasons import Reason
from tests.backends.cases import HERE

LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)
TABLES = torch.tensor([[0, 9], [1, 2]], dtype=torch.int32)


class Played:
    """A wrapper that remembers how it was planned, and gives back the queries."""

    def __init__(self) -> None:
        self.planned: dict[str, Any] = {}
        self.positions: tuple[Any, ...] = ()

    def plan(self, *positions: Any, **named: Any) -> None:
        self.positions, self.planned = positions, named

    def run(self, *operands: Any, **named: Any) -> Any:
        q = (named.get("query") or operands)[0]
        self.planned["log-sum-exp"] = any(flag is True for flag in (*operands[-1:], named.get("return_lse")))
        return (q, q[..., 0]) if self.planned["log-sum-exp"] else q


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    wrapper = Played()

    def run(kind: Any, lengths: Any, make: Any, plan: Callable[[Any], None], launch: Any) -> Any:
        assert isinstance(lengths, planning.PlanKey)
        plan(wrapper)
        return launch(wrapper)

    monkeypatch.setattr(planning, "stream_workspaces", lambda device: SimpleNamespace(run=run))
    csr = SimpleNamespace(csr=lambda **named: named)
    for module in (attention, mla):
        library = SimpleNamespace(MLAPlanMetadata=csr, BatchMLAPagedAttentionWrapper=object)
        monkeypatch.setattr(module, "module", lambda name="", library=library: library)
    return wrapper


def called(op: str, load: Callable[[str], Callable[..., Any]], *operands: Tensor, **flags: Any) -> Any:
    return load("fa3")(*table.get(op).build(*operands, **flags)[1])


def test_one_thread_imports_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules import each other in circles: a second thread would meet the package half made."""
    inside, most, both = [0], [0], threading.Barrier(2)

    def importing(name: str) -> object:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return object()

    def load(name: str) -> None:
        both.wait(20.0)
        common.module.__wrapped__(name)

    monkeypatch.setattr("importlib.import_module", importing)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, ("flashinfer.norm", "flashinfer.sampling")))
    assert most == [1]


def test_sampling_without_a_filter_waits_for_no_compiler_of_its() -> None:
    """Its sampler takes filtered calls alone: another kernel draws all others without its module."""
    sampler = next(kernel for kernel in SAMPLERS if kernel.op == "sample")
    logits = torch.randn(2, 8)
    asked: tuple[tuple[dict[str, float], bool], ...] = (
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": 2}, False),
        ({"top_p": 0.5}, False),
    )
    for filters, refused in asked:
        request = table.get("sample").check(table.get("sample").build(logits, seed=1, **filters)[1])
        reasons = {rejected.reason for rejected in rejections(sampler, request, HERE)}
        assert (Reason.FEATURE_REQUIRED in reasons) == refused


FLAGS = {"is_causal": True, "scale": 0.5, "return_lse": True}


def test_a_dense_batch_is_planned_as_a_ragged_one(played: Played) -> None:
    """Offsets follow from the shape; the results come back in the call's."""
    q, k = torch.randn(2, 3, 4, 64), torch.randn(2, 5, 2, 64)
    out, lse = called("attention", attention._dense, q, k, k, softcap=7.0, layout="BSHD", **FLAGS)
    queries, keys, *sizes = played.positions
    assert (queries.tolist(), keys.tolist(), sizes) == ([0, 3, 6], [0, 5, 10], [4, 2, 64])
    assert (played.planned["causal"], played.planned["sm_scale"]) == (True, 0.5)
    assert played.planned["logits_soft_cap"] == 7.0
    assert torch.equal(out, q) and lse.shape == (2, 4, 3)


def test_a_ragged_batch_is_planned_by_its_offsets(played: Played) -> None:
    """Keys that have no offsets of their own share those of the queries."""
    q, k = torch.randn(8, 4, 64), torch.randn(8, 2, 64)
    out = called("ragged_attention", attention._ragged, q, k, k, OFFSETS, is_causal=True, scale=0.25)
    assert [values.tolist() for values in played.positions[:2]] == [[0, 3, 8], [0, 3, 8]]
    assert (played.planned["sm_scale"], played.planned["log-sum-exp"]) == (0.25, False)
    assert torch.equal(out, q)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_planned_in_their_layout(played: Played, layout: str) -> None:
    """Page size, heads and bytes of a page are read along the axes that the layout says."""
    q, pool = torch.randn(2, 4, 64), torch.randn(10, 16, 2, 64)
    pool = pool if layout == "NHD" else pool.transpose(1, 2).contiguous()
    out, _ = called(
        "paged_attention", attention._paged, q, pool, pool, TABLES, LENGTHS, layout=layout, **FLAGS
    )
    tables, lengths, starts, size, page_bytes, named, sizes = played.positions
    assert (size, sizes, page_bytes) == (16, (4, 2, 64), 2 * 16 * 2 * 64 * 4)
    assert (named["causal"], named["sm_scale"], named["logits_soft_cap"]) == (True, 0.5, None)
    assert torch.equal(tables, TABLES) and torch.equal(lengths, LENGTHS) and starts.tolist() == [0, 1, 2]
    assert torch.equal(out, q)


def test_latent_pages_keep_their_two_widths(played: Played) -> None:
    """Scale, widths and the request for a log-sum-exp arrive by their names."""
    nope, pe = torch.randn(2, 4, 512), torch.randn(2, 4, 64)
    pools = torch.randn(10, 16, 512), torch.randn(10, 16, 64)
    out, _ = called("mla_attention", mla._latent, nope, pe, *pools, TABLES, LENGTHS, **FLAGS)
    planned = played.planned
    assert (planned["head_dim_ckv"], planned["head_dim_kpe"], planned["page_size"]) == (512, 64, 16)
    assert (planned["sm_scale"], planned["causal"], planned["lse_mode"]) == (0.5, True, "basee")
    assert planned["metadata"]["kv_len_arr"].tolist() == [3, 5]
    assert torch.equal(out, nope)
