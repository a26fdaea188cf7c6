"""Half precision over 8,192 and 32,768 tokens: the sources' tables and twice torch's own error, both held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops import table
from layerzero.spec.tolerances import mismatches
from tests.bounds import SOURCES
from tests.precision import beyond_sources

QUERIES, HEADS, DIM, PAGE = 16, 4, 64, 16
STEP = 61  # of many rows so many are passed over between two that are compared


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime on the CPU, whose kernels are asked by name."""
    with lz.start(lz.Settings(warm="off", device="cpu", inference=True), scoped=True) as opened:
        yield opened


def _drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _attention(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """The last queries of a sequence, four heads over one of keys."""
    k, v = _drawn(dtype, 1, 1, tokens, DIM), _drawn(dtype, 1, 1, tokens, DIM) + 0.5
    return {"q": _drawn(dtype, 1, HEADS, QUERIES, DIM), "k": k, "v": v, "is_causal": True}


def _ragged(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    q_ends, k_ends = torch.tensor([0, QUERIES]), torch.tensor([0, tokens])
    rows = {"k": _drawn(dtype, tokens, 1, DIM), "v": _drawn(dtype, tokens, 1, DIM) + 0.5}
    given = {"q": _drawn(dtype, QUERIES, HEADS, DIM), **rows, "cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends}
    return {**given, "is_causal": True}


def _paged(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    pages = tokens // PAGE
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()[None]
    pools = {n: _drawn(dtype, pages, PAGE, 1, DIM) + (n == "v_cache") for n in ("k_cache", "v_cache")}
    lens = torch.tensor([tokens - 3])
    return {"q": _drawn(dtype, 1, HEADS, DIM), **pools, "block_tables": order, "seq_lens": lens}


def _norm(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": _drawn(dtype, tokens, DIM), "weight": _drawn(dtype, DIM)}


def _linear(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"x": _drawn(dtype, tokens, DIM), "weight": _drawn(dtype, 32, DIM) * DIM**-0.5}


def _rope(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    positions = torch.arange(tokens)
    angle = positions[:, None] * 10_000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    tables = {"cos": angle.cos().float(), "sin": angle.sin().float()}
    return {
        "q": _drawn(dtype, tokens, 2, DIM),
        "k": _drawn(dtype, tokens, 1, DIM),
        "positions": positions,
        **tables,
    }


CASES: dict[str, tuple[str, Callable[[int, torch.dtype], dict[str, Any]]]] = {
    "attention": ("attention", _attention), "ragged_attention": ("attention", _ragged),
    "paged_attention": ("attention", _paged), "rms_norm": ("norm", _norm), "layer_norm": ("norm", _norm),
    "linear": ("linear", _linear), "rope": ("rope", _rope),
}  # fmt: skip


def _parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("tokens", [8_192, 32_768])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_many_tokens_are_within_both_tolerances(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Every backend that takes the call agrees with the float64 reference, by the table and beside torch."""
    kind, make = CASES[name]
    given, op = make(tokens, dtype), table.get(name)
    full = op.build(**given)[1]
    wide = op.build(**{n: v.double() if _is_number(v) else v for n, v in given.items()})[1]
    truths, bases = _parts(op.reference(*wide)), _parts(op.reference(*full))
    backends = sorted({info.backend for info in lz.list_kernels(name)})
    asked = 0
    for backend in backends:
        try:
            outs = _parts(getattr(lz.sync, name)(**given, backend=backend))
        except (lz.NoKernelFoundError, lz.BackendNotAvailableError):
            continue
        asked += 1
        for whole in zip(outs, truths, bases, strict=True):
            out, truth, base = (part[::STEP] if len(part) == tokens else part for part in whole)
            assert out.dtype == dtype and not mismatches(out, truth, base.to(dtype)), backend
            assert beyond_sources(kind, out, truth) == "", backend
    assert asked >= 2, backends


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_is_further_off_than_the_table_is_said(kind: str, dtype: torch.dtype) -> None:
    """A little more than is allowed of one element in a hundred is counted; the rounded truth passes."""
    truth = torch.rand(10, 10, dtype=torch.float64) / 64
    off = truth.to(dtype)
    assert beyond_sources(kind, off, truth) == ""
    off[3, 4] += 4 * SOURCES[kind][dtype]
    assert "1 of 100 beyond" in beyond_sources(kind, off, truth)
