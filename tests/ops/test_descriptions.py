"""A valid call of attention is described whatever its sizes, and what decides about it is in its key."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ops.attention.attention import ATTENTION, attention
from layerzero.ops.attention.checks import infer_layout
from layerzero.selection.key import KeyBuilder, grid
from layerzero.spec.condition import parse_limit
from tests.kernels import kernel
from tests.profiles import CALLS, most_calls

DTYPES = ("float16", "bfloat16", "float32", "float64")
LIMITS = ("Sk <= 1000", "D % 8 == 0", "Sq == Sk")
KEYS = KeyBuilder(ATTENTION, [kernel("made.attention.bounded", limits=LIMITS)], ())


def tensors(
    batch: int, sq: int, sk: int, heads_k: int, group: int, size: int, layout: str, dtype: str
) -> list[torch.Tensor]:
    """q, k and v of these sizes on torch's device without data."""
    made = []
    for heads, length in ((heads_k * group, sq), (heads_k, sk), (heads_k, sk)):
        shape = (batch, heads, length, size) if layout == "BHSD" else (batch, length, heads, size)
        made.append(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
    return made


Sizes = tuple[int, int, int, int, int, int, str, str]


def size(source: random.Random, most: int) -> int:
    """From 1 to `most`: the ends, powers of two, their neighbours, and anything between."""
    near = (1 << source.randrange(most.bit_length())) + source.randint(-1, 1)
    return source.choice((1, most, min(max(near, 1), most), source.randint(1, most), source.randint(1, most)))


def drawn(source: random.Random) -> Sizes:
    """The arguments of `tensors`."""
    batch, sq, sk, heads_k, group, width = (size(source, most) for most in (128, 8192, 8192, 16, 8, 512))
    layout, dtype = source.choice(("BHSD", "BSHD")), source.choice(DTYPES)
    return batch, sq, sk, heads_k, group, width, layout, dtype


seeds = st.integers(0, 2**32 - 1)


@most_calls
@given(seeds)
def test_every_valid_call_is_described(seed: int) -> None:
    """Sizes up to 128 x 8,192 x 512 in both layouts: they come out as they went in, once and again (T32)."""
    source = random.Random(seed)
    for _ in range(CALLS):
        _is_described(*drawn(source), source.random() < 0.5)


def _is_described(
    batch: int, sq: int, sk: int, heads_k: int, group: int, size: int, layout: str, dtype: str, causal: bool
) -> None:
    q, k, v = tensors(batch, sq, sk, heads_k, group, size, layout, dtype)
    _, args = attention(q, k, v, is_causal=causal, layout=layout)
    found = ATTENTION.check(args)
    assert found.dims == {
        "B": batch, "Hq": heads_k * group, "Hk": heads_k, "G": group, "Sq": sq, "Sk": sk, "D": size,
        "Dv": size,
    }  # fmt: skip
    assert (found.dtype, found.layout, "causal" in found.features) == (dtype, layout, causal)
    assert KEYS.key(found) == KEYS.key(ATTENTION.check(args))
    out = ATTENTION.outputs(args)
    assert (out[0].shape, out[0].dtype) == (tuple(q.shape), dtype)
    if sq % sk:
        assert infer_layout(q, k, v) == layout
    else:  # heads and tokens may be read either way
        with pytest.raises(ValueError, match="pass layout="):
            infer_layout(q, k, v)


OTHER = {
    "dtype": "float8", "dtypes": ("float16", "float32", "float16"), "device": "cuda:1", "layout": "SBHD",
    "features": frozenset({"softcap"}), "modes": frozenset({"deterministic"}), "contiguous": False,
    "last_stride1": False, "alignment": 1, "op": "paged_attention",
}  # fmt: skip


@most_calls
@given(seeds)
def test_a_key_keeps_all_that_decides(seed: int) -> None:
    """Another exact field is another key; another size is, where its grid point or a bound differs (T32)."""
    source = random.Random(seed)
    for _ in range(CALLS):
        field, dim = source.choice(sorted(OTHER)), source.choice(("B", "Hq", "Sq", "Sk", "D"))
        _keeps_all_that_decides(drawn(source), field, dim, size(source, 100) - 1)


def _keeps_all_that_decides(sizes: Sizes, field: str, dim: str, more: int) -> None:
    request = ATTENTION.check(attention(*tensors(*sizes), layout=sizes[6])[1])
    key = KEYS.key(request)
    assert hash(key) == hash(KEYS.key(request.replace(dims=dict(reversed(list(request.dims.items()))))))
    assert KEYS.key(request.replace(**{field: OTHER[field]})) != key
    grown = {**request.dims, dim: request.dims[dim] + more}
    same_point = grown[dim] == request.dims[dim] if dim in ATTENTION.exact_dims else (
        grid(grown[dim]) == grid(request.dims[dim])
    )  # fmt: skip
    same_bounds = all(limit.holds(grown) == limit.holds(request.dims) for limit in map(parse_limit, LIMITS))
    assert (KEYS.key(request.replace(dims=grown)) == key) == (same_point and same_bounds)
