"""The standard shapes that tuning covers when no shapes are given: those of common models, by device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

from layerzero.measure.calls import Call, call, tensor
from layerzero.ops import table as ops_table

Dtypes = tuple[str, ...]


def standard_calls(ops: Sequence[str] | None, platform: str, quick: bool = False) -> tuple[Call, ...]:
    """Calls for each of `ops` (all that have standard shapes by default) on a kind of device.

    After one shape of each op, ops advance together, and the shapes of one are shuffled, always alike: tuning
    that ends early has seen the same share of each.
    """
    dtypes: Dtypes = ("bfloat16",) if platform == "cuda" else ("float32", "bfloat16")
    small = platform != "cuda"
    calls: list[tuple[float, Call]] = []
    for name in ops if ops is not None else _SHAPES:
        ops_table.get(name)
        for dtype in dtypes[:1] if quick else dtypes:
            shuffled = sorted(_SHAPES[name](dtype, small) if name in _SHAPES else (), key=_shuffle_key)
            selected = shuffled[:3] if quick else shuffled
            calls += [
                (position and (position + 0.5) / len(selected), each)
                for position, each in enumerate(selected)
            ]
    calls.sort(key=lambda pair: pair[0])
    return tuple({str(made): made for _, made in calls}.values())


def _shuffle_key(described: Call) -> bytes:
    return hashlib.blake2b(str(described).encode(), digest_size=8).digest()


def attention(
    b: int, hq: int, hk: int, sq: int, sk: int, d: int, dtype: str = "bfloat16", causal: bool = True,
    **flags: int | float | bool | str | tuple[int, ...] | None,
) -> Call:  # fmt: skip
    """One dense attention call, BHSD."""
    q, kv = tensor(b, hq, sq, d, dtype=dtype), tensor(b, hk, sk, d, dtype=dtype)
    return call("attention", q=q, k=kv, v=kv, is_causal=causal, **flags)


def paged_call(
    b: int, hq: int, hk: int, context: int, d: int, page: int, dtype: str = "bfloat16", queries: int = 1
) -> Call:
    """One paged attention call: pages in random order, every sequence with its full context."""
    pages = -(-context // page)
    pool = tensor(b * pages, page, hk, d, dtype=dtype)
    offsets = None if queries == 1 else tensor(b + 1, dtype="int32", fill="ramp", bound=queries)
    return call(
        "paged_attention",
        q=tensor(b * queries, hq, d, dtype=dtype),
        k_cache=pool,
        v_cache=pool,
        block_tables=tensor(b, pages, dtype="int32", fill="permutation", bound=b * pages),
        seq_lens=tensor(b, dtype="int32", fill="constant", bound=context),
        cu_seqlens_q=offsets,
    )


def ragged_call(
    b: int, hq: int, hk: int, length: int, d: int, dtype: str = "bfloat16", causal: bool = True
) -> Call:
    """One call over `b` sequences of equal length, one after the other."""
    offsets = tensor(b + 1, dtype="int32", fill="ramp", bound=length)
    kv = tensor(b * length, hk, d, dtype=dtype)
    q = tensor(b * length, hq, d, dtype=dtype)
    return call(
        "ragged_attention", q=q, k=kv, v=kv, cu_seqlens_q=offsets, cu_seqlens_k=offsets, is_causal=causal
    )


def norm(op: str, rows: int, width: int, dtype: str = "bfloat16") -> Call:
    """One call of a norm, with weight (and residual, and bias where the op has one)."""
    x, weight = tensor(rows, width, dtype=dtype), tensor(width, dtype=dtype)
    optional = {"residual": x} if op.startswith("add_") else {}
    if op.endswith("layer_norm"):
        optional["bias"] = weight
    return call(op, x=x, weight=weight, **optional)


def linear(rows: int, k: int, n: int, dtype: str = "bfloat16", bias: bool = False) -> Call:
    """One matrix product of `rows` with a weight (n, k)."""
    weight = tensor(n, k, dtype=dtype, scale=k**-0.5)
    optional = {"bias": tensor(n, dtype=dtype)} if bias else {}
    return call("linear", x=tensor(rows, k, dtype=dtype), weight=weight, **optional)


def mlp(
    rows: int, c: int, f: int, dtype: str = "bfloat16", activation: str = "swiglu", bias: bool = False
) -> Call:
    """One feed-forward block."""
    wide = (2 if activation == "swiglu" else 1) * f
    up = tensor(wide, c, dtype=dtype, scale=c**-0.5)
    down = tensor(c, f, dtype=dtype, scale=f**-0.5)
    optional = {"b_up": tensor(wide, dtype=dtype), "b_down": tensor(c, dtype=dtype)} if bias else {}
    return call(
        "mlp", x=tensor(rows, c, dtype=dtype), w_up=up, w_down=down, activation=activation, **optional
    )


def embedding(rows: int, vocabulary: int, width: int, dtype: str = "bfloat16") -> Call:
    """Look up `rows` rows of a table."""
    ids = tensor(rows, dtype="int64", fill="below", bound=vocabulary)
    return call("embedding", ids=ids, weight=tensor(vocabulary, width, dtype=dtype))


def rope(tokens: int, hq: int, hk: int, d: int, dtype: str = "bfloat16") -> Call:
    """Rotate the queries and keys of `tokens` tokens by tables of 4096 positions."""
    table = tensor(4096, d // 2, dtype="float32")
    return call(
        "rope", q=tensor(tokens, hq, d, dtype=dtype), k=tensor(tokens, hk, d, dtype=dtype),
        positions=tensor(tokens, dtype="int64", fill="below", bound=4096), cos=table, sin=table,
    )  # fmt: skip


def sample(rows: int, vocabulary: int, dtype: str = "float32") -> Call:
    """Draw one token a row, top-k and top-p."""
    return call("sample", logits=tensor(rows, vocabulary, dtype=dtype), top_k=40, top_p=0.9, seed=7)


def _attention(dtype: str, small: bool) -> Iterator[Call]:
    if small:
        for b, sq in ((1, 16), (1, 128), (1, 512), (8, 32), (8, 128), (1, 1024)):
            for hq, hk, d in ((12, 12, 32), (12, 12, 64), (8, 2, 64), (8, 2, 128)):
                yield attention(b, hq, hk, sq, sq, d, dtype, causal=hq != 12)
        for b, sk in ((1, 128), (1, 1024), (8, 128), (8, 1024), (32, 512)):
            for hq, hk, d in ((12, 12, 64), (8, 2, 64), (8, 2, 128)):
                yield attention(b, hq, hk, 1, sk, d, dtype, causal=False)
        for b, sk in ((1, 1024), (8, 128), (8, 1024), (32, 512)):
            yield attention(b, 12, 12, 1, sk, 32, dtype, causal=False)
            yield attention(b, 8, 1, 1, sk, 128, dtype, causal=False)
        for hq, hk, sq, window_left in ((8, 2, 1024, 127), (12, 12, 256, 63)):
            yield attention(1, hq, hk, sq, sq, 64, dtype, window=(window_left, 0))
        return
    yield from _large_attention(dtype)


def _large_attention(dtype: str) -> Iterator[Call]:
    heads = ((32, 32, 64), (32, 8, 128), (32, 1, 128), (16, 16, 128), (16, 2, 256), (24, 24, 96))
    for hq, hk, d in heads:
        for b, sq in ((1, 128), (1, 512), (1, 2048), (1, 8192), (4, 1024), (16, 512)):
            yield attention(b, hq, hk, sq, sq, d, dtype)
        for b, sq in ((1, 128), (32, 128), (1, 1024), (2, 4096)):
            yield attention(b, hq, hk, sq, sq, d, dtype, causal=False)
        for b, sk in ((1, 512), (1, 4096), (1, 32768), (16, 512), (16, 4096), (64, 4096), (256, 1024)):
            yield attention(b, hq, hk, 1, sk, d, dtype, causal=False)
        for b, sq, sk in ((4, 4096, 77), (1, 256, 4096)):
            yield attention(b, hq, hk, sq, sk, d, dtype, causal=False)
        for b, sq, sk in ((1, 512, 4096), (4, 16, 2048), (8, 128, 1024)):
            yield attention(b, hq, hk, sq, sk, d, dtype)
    for sq, window_left in ((1024, 255), (4096, 1023), (16384, 1023), (16384, 4095)):
        yield attention(1, 32, 8, sq, sq, 128, dtype, window=(window_left, 0))
    yield attention(1, 32, 8, 32768, 32768, 128, dtype)
    yield attention(1, 32, 8, 1, 131072, 128, dtype, causal=False)
    yield from _other_heads(dtype)


def _other_heads(dtype: str) -> Iterator[Call]:
    # Two, four and eight query heads to one of keys, at the head sizes that have kernels of their own.
    for hq, hk, d in ((8, 4, 256), (16, 8, 256), (32, 8, 64), (64, 8, 128)):
        for b, sq in ((1, 256), (1, 1024), (2, 4096), (8, 512)):
            yield attention(b, hq, hk, sq, sq, d, dtype)
        for b, sk in ((1, 1024), (1, 16384), (8, 2048), (64, 1024), (128, 4096)):
            yield attention(b, hq, hk, 1, sk, d, dtype, causal=False)
        yield attention(2, hq, hk, 64, 2048, d, dtype)
    # Encoders of texts and of images.
    for heads in (12, 16):
        for b, sq in ((1, 512), (1, 2048), (1, 4096), (8, 256), (8, 1024), (32, 512), (64, 128)):
            yield attention(b, heads, heads, sq, sq, 64, dtype, causal=False)
    for sq in (2048, 8192):
        yield attention(1, 8, 4, sq, sq, 256, dtype, window=(1023, 0))
    yield from _between_tiles(dtype)


def _between_tiles(dtype: str) -> Iterator[Call]:
    # Lengths that no tile divides, which cost some kernels a tenth or more and others nothing.
    for hq, hk, d in ((16, 16, 64), (24, 24, 96), (32, 8, 128), (16, 8, 256)):
        for b, sq, sk in ((1, 1400, 1400), (4, 2900, 2900), (12, 1400, 1400), (6, 5300, 2300)):
            yield attention(b, hq, hk, sq, sk, d, dtype, causal=False)
        yield attention(2, hq, hk, 700, 1430, d, dtype)
    # A shard's few heads: short prompts, and chunks behind a long context.
    for b, hq, hk, sq, d in (
        (2, 1, 1, 700, 128),
        (4, 2, 2, 450, 64),
        (3, 8, 1, 600, 128),
        (2, 4, 4, 1900, 96),
    ):
        yield attention(b, hq, hk, sq, sq, d, dtype)
    for b, hq, hk, sq, sk, d in (
        (6, 8, 1, 120, 15_000, 96),
        (4, 8, 1, 250, 20_000, 128),
        (8, 4, 2, 90, 9000, 64),
    ):
        yield attention(b, hq, hk, sq, sk, d, dtype)
    for b, hq, hk, sk in ((2, 32, 32, 2700), (24, 16, 8, 3700), (150, 16, 8, 900)):
        yield attention(b, hq, hk, 1, sk, 256, dtype, causal=False)


def _paged(dtype: str, small: bool) -> Iterator[Call]:
    if small:
        for b, context in ((1, 128), (1, 2048), (8, 512), (16, 128), (16, 1024)):
            for page in (1, 16, 64):
                yield paged_call(b, 8, 2, context, 64, page, dtype)
        return
    for hq, hk, d in ((32, 8, 128), (32, 32, 128), (64, 8, 128), (32, 8, 64)):
        for b, context in ((1, 512), (1, 8192), (1, 65536), (16, 1024), (16, 8192), (64, 512), (64, 4096),
                           (256, 2048)):  # fmt: skip
            for page in (1, 16, 64) if (hq, hk, d) == (32, 8, 128) or context in (1024, 8192) else (16,):
                yield paged_call(b, hq, hk, context, d, page, dtype)
        for b, queries in ((4, 512), (2, 128)):
            yield paged_call(b, hq, hk, 2048, d, 16, dtype, queries=queries)


def _ragged(dtype: str, small: bool) -> Iterator[Call]:
    some = ((1, 128), (4, 64), (8, 128))
    for b, length in some if small else ((1, 2048), (1, 8192), (4, 512), (16, 256), (64, 128), (8, 2048)):
        for hq, hk, d in ((8, 8, 64), (8, 2, 64)) if small else ((32, 8, 128), (32, 32, 64)):
            yield ragged_call(b, hq, hk, length, d, dtype)
    for b, length in ((4, 16), (16, 24), (24, 32), (72, 28), (8, 128)) if small else ():
        yield ragged_call(b, 12, 12, length, 32, dtype, causal=False)


def _norms(op: str) -> Callable[[str, bool], Iterator[Call]]:
    def shapes(dtype: str, small: bool) -> Iterator[Call]:
        rows = (1, 16, 256, 2048) if small else (1, 16, 64, 256, 2048, 16384)
        widths = (384, 1024, 4096) if small else (128, 1024, 2048, 3072, 4096, 8192)
        for n in rows:
            for c in widths:
                yield norm(op, n, c, dtype)

    return shapes


def _linear(dtype: str, small: bool) -> Iterator[Call]:
    rows = (1, 8, 64, 256) if small else (1, 8, 64, 256, 2048, 8192)
    sizes = ((384, 384), (384, 1536), (1024, 1024)) if small else ((4096, 4096), (4096, 14336), (14336, 4096))
    for n in rows:
        for k, out in sizes:
            yield linear(n, k, out, dtype)
    # An encoder's projections, over the texts of a batch.
    for n in (16, 64, 256, 512, 1024, 2048, 4096, 8192) if small else ():
        for out in (384, 1152):
            yield linear(n, 384, out, dtype, bias=True)


def _mlp(dtype: str, small: bool) -> Iterator[Call]:
    for n in (1, 16, 256) if small else (1, 16, 64, 256, 2048):
        yield mlp(n, 384 if small else 4096, 1536 if small else 14336, dtype, "gelu")
        yield mlp(n, 384 if small else 4096, 1024 if small else 14336, dtype, "swiglu")
    for n in (16, 64, 256, 512, 1024, 2048, 4096, 8192) if small else ():
        yield mlp(n, 384, 1536, dtype, "gelu", bias=True)
    # Small enough that launching them takes longer than the products.
    for n in () if small else (1, 16, 256, 2048):
        yield mlp(n, 2048, 8192, dtype, "swiglu")
        yield mlp(n, 768, 3072, dtype, "gelu", bias=True)


def _rope(dtype: str, small: bool) -> Iterator[Call]:
    for n in (1, 16, 256) if small else (1, 64, 256, 2048, 16384):
        yield rope(n, 8 if small else 32, 2 if small else 8, 64 if small else 128, dtype)


def _embedding(dtype: str, small: bool) -> Iterator[Call]:
    for n in (1, 16, 256, 2048):
        yield embedding(n, 30_522 if small else 128_256, 384 if small else 4096, dtype)


def _sample(dtype: str, small: bool) -> Iterator[Call]:
    for n in (1, 8, 32) if small else (1, 8, 64, 256):
        for vocabulary in (8000,) if small else (32_000, 49_152, 128_256, 262_144):
            yield sample(n, vocabulary)


_SHAPES: dict[str, Callable[[str, bool], Iterator[Call]]] = {
    "attention": _attention,
    "paged_attention": _paged,
    "ragged_attention": _ragged,
    **{op: _norms(op) for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")},
    "linear": _linear,
    "mlp": _mlp,
    "rope": _rope,
    "embedding": _embedding,
    "sample": _sample,
}
