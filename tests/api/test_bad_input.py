"""Wrong arguments name themselves and change nothing, first call and cached call alike."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.runtime import current

Q = torch.randn(1, 4, 6, 8)
K = torch.randn(1, 2, 6, 8)
X = torch.randn(3, 8)

Refusal = type[Exception] | tuple[type[Exception], ...]
CASES: list[tuple[str, str, tuple[Any, ...], dict[str, Any], Refusal, str]] = [
    ("wrong rank", "attention", (X, Q, Q), {}, ValueError, "q"),
    ("string for a tensor", "attention", ("float32", Q, Q), {}, TypeError, "q"),
    ("list for a tensor", "rms_norm", ([1.0, 2.0],), {}, TypeError, "x"),
    ("missing tensor", "attention", (Q, Q), {}, TypeError, "v"),
    ("unknown keyword", "rms_norm", (X,), {"epsilon": 1e-6}, TypeError, "epsilon"),
    ("heads that do not divide", "attention", (Q, torch.randn(1, 3, 6, 8), torch.randn(1, 3, 6, 8)),
     {}, ValueError, "head"),
    ("mismatched head sizes", "attention", (Q, torch.randn(1, 2, 6, 16), K), {}, ValueError, "k"),
    ("mismatched lengths of k and v", "attention", (Q, K, torch.randn(1, 2, 5, 8)), {}, ValueError, "v"),
    ("other device", "attention", (Q, K.to("meta"), K), {}, ValueError, "k"),
    ("integer tensor", "attention", (Q.int(), K, K), {}, TypeError, "q"),
    ("mask that cannot broadcast", "attention", (Q, K, K),
     {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "attn_mask"),
    ("mask with is_causal", "attention", (Q, K, K),
     {"attn_mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True}, ValueError, "is_causal"),
    ("mask of integers", "attention", (Q, K, K),
     {"attn_mask": torch.ones(6, 6, dtype=torch.int64)}, TypeError, "attn_mask"),
    ("unknown layout", "attention", (Q, K, K), {"layout": "HBSD"}, ValueError, "layout"),
    ("ambiguous layout", "attention", (torch.randn(1, 4, 4, 8),) * 3, {"layout": None}, ValueError, "layout"),
    ("head_dim 0", "attention", (Q[..., :0], K[..., :0], K[..., :0]), {}, ValueError, "head"),
    ("dropout out of range", "attention", (Q, K, K), {"dropout_p": 1.5}, ValueError, "dropout_p"),
    ("scale that is no number", "attention", (Q, K, K), {"scale": "big"}, TypeError, "scale"),
    ("scale NaN", "attention", (Q, K, K), {"scale": float("nan")}, ValueError, "scale"),
    ("window that is no pair", "attention", (Q, K, K),
     {"window": (1, 2, 3)}, (ValueError, TypeError), "window"),
    ("window of words", "attention", (Q, K, K),
     {"window": ["left", "right"]}, (ValueError, TypeError), "window"),
    ("negative softcap", "attention", (Q, K, K), {"softcap": -1.0}, ValueError, "softcap"),
    ("weight of another width", "rms_norm", (X, torch.ones(7)), {}, ValueError, "weight"),
    ("eps below zero", "rms_norm", (X,), {"eps": -1.0}, ValueError, "eps"),
    ("inner widths differ", "linear", (X, torch.randn(5, 7)), {}, ValueError, "weight"),
    ("bias of another width", "linear", (X, torch.randn(5, 8), torch.randn(4)), {}, ValueError, "bias"),
    ("unknown activation", "mlp", (X, torch.randn(6, 8), torch.randn(8, 3)),
     {"activation": "swish"}, ValueError, "activation"),
    ("odd gate width", "mlp", (X, torch.randn(7, 8), torch.randn(8, 3)), {}, ValueError, "w_up"),
    ("float ids", "embedding", (torch.randn(3), torch.randn(4, 8)), {}, TypeError, "ids"),
    ("id out of range", "embedding", (torch.tensor([0, 4]), torch.randn(4, 8)), {}, ValueError, "ids"),
    ("negative id", "embedding", (torch.tensor([0, -1]), torch.randn(4, 8)), {}, ValueError, "ids"),
    ("padding index out of range", "embedding", (torch.tensor([0]), torch.randn(4, 8)),
     {"padding_idx": 9}, ValueError, "padding_idx"),
    ("top_p above one", "sample", (X,), {"top_p": 1.5}, ValueError, "top_p"),
    ("negative temperature", "sample", (X,), {"temperature": -1.0}, ValueError, "temperature"),
    ("reduction unknown", "cross_entropy", (X, torch.tensor([0, 1, 2])),
     {"reduction": "avg"}, ValueError, "reduction"),
    ("target out of range", "cross_entropy", (X, torch.tensor([0, 1, 8])), {}, ValueError, "target"),
    ("sparse tensor", "rms_norm", (X.to_sparse(),), {}, (ValueError, TypeError), "x"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, which knows what memory is free: the first look makes plans anew."""
    with lz.start(lz.Settings(warm="off")):
        device, looked = current().device("cpu"), threading.Event()
        device._refresh_workspace_budget()
        device.loader.submit(looked.set)
        assert looked.wait(60)
        yield


def state() -> Any:
    """What a refused call must leave alone: policy, generation, health, plans by signature."""
    device = current().device("cpu")
    plans = {name: [len(h) for h in table.by_signature] for name, table in device.snapshot.tables.items()}
    return current().policy, device.dispatch_version, device.health.blocked_kernels(), plans


def _blocking(op: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return getattr(layerzero.sync, op)(*args, **keywords)


def _awaited(op: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    async def main() -> Any:
        return await getattr(lz, op)(*args, **keywords)

    return asyncio.run(main())


def _bound(op: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return lz.bind(op, *args, **keywords)(*args)


@pytest.mark.parametrize("call", [_blocking, _awaited, _bound], ids=["blocking", "awaited", "bound"])
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_wrong_argument_is_named(call: Callable[..., Any], case: tuple[Any, ...]) -> None:
    """The same exception from every surface, twice in a row, and nothing that it left behind."""
    _, op, args, keywords, kind, named = case
    _blocking("rms_norm", (X,), {})
    with pytest.raises(kind, match=named):
        call(op, args, keywords)
    before = state()
    with pytest.raises(kind, match=named):
        call(op, args, keywords)
    assert state() == before


def test_nan_and_inf_go_through() -> None:
    """EC-016: they are data, not errors."""
    x = X.clone()
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    out = layerzero.sync.rms_norm(x)
    assert out[0].isnan().all()
    assert torch.isfinite(out[2]).all()
    k = K.clone()
    k[0, 0, 2, 0] = float("nan")
    assert layerzero.sync.attention(Q, k, K)[0, 0].isnan().all()
    assert layerzero.sync.attention(Q, K, k)[0, 0, :, 0].isnan().all()
    assert torch.isfinite(layerzero.sync.attention(Q, k, K)[0, 2:]).all()


def test_a_query_row_of_nan_is_zero_in_torchs_cpu_flash_and_nan_elsewhere() -> None:
    """A known limit of torch's own CPU kernel, pinned so that its repair is noticed."""
    q = Q.clone()
    q[0, 0, 0, 0] = float("nan")
    for kernel in ("reference.attention", "torch.attention.sdpa_math"):
        assert layerzero.sync.attention(q, K, K, backend=kernel)[0, 0, 0].isnan().all()
    assert (layerzero.sync.attention(q, K, K, backend="torch.attention.sdpa_flash_cpu")[0, 0, 0] == 0).all()


def test_an_op_without_a_gradient_says_so() -> None:
    """Sampling from logits that require grad is refused by name; under no_grad it runs."""
    logits = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="sample has no gradient"):
        layerzero.sync.sample(logits, seed=1)
    with torch.no_grad():
        assert layerzero.sync.sample(logits, seed=1).shape == (2,)


def test_what_concerns_waiting_is_checked_by_name() -> None:
    """A timeout that is no number and a backend that is no name say so, and nothing runs."""
    with pytest.raises(TypeError, match="backend needs a kernel id"):
        layerzero.sync.rms_norm(X, backend=3)  # type: ignore[arg-type]

    async def two(**keywords: Any) -> None:
        await asyncio.gather(lz.rms_norm(X), lz.rms_norm(X, **keywords))

    for timeout, kind in (("x", TypeError), (float("nan"), ValueError), (-1.0, ValueError)):
        with pytest.raises(kind, match="timeout"):
            asyncio.run(two(timeout=timeout))
    with pytest.raises(ValueError, match="priority"):
        asyncio.run(two(priority=7))
