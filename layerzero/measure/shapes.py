"""The standard shapes that tuning covers when none are given, out of `standard_shapes.toml`, by device."""

from __future__ import annotations

import functools
import hashlib
import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero.measure.calls import Call, call, tensor
from layerzero.ops import table as ops_table

Dtypes = tuple[str, ...]


def standard_calls(ops: Sequence[str] | None, platform: str, quick: bool = False) -> tuple[Call, ...]:
    """Calls for each of `ops` (all that have standard shapes by default) on a kind of device.

    After one shape of each op, ops advance together, and the shapes of one are shuffled, always alike: tuning
    that ends early has seen the same share of each.
    """
    dtypes: Dtypes = ("bfloat16",) if platform == "cuda" else ("float32", "bfloat16")
    calls: list[tuple[float, Call]] = []
    for name in ops if ops is not None else _BUILDERS:
        ops_table.get(name)
        for dtype in dtypes[:1] if quick else dtypes:
            # By a hash: in the same order everywhere.
            shuffled = sorted(
                _standard(name, dtype, platform),
                key=lambda each: hashlib.blake2b(str(each).encode(), digest_size=8).digest(),
            )
            selected = shuffled[:3] if quick else shuffled
            count = len(selected)
            calls += [(place and (place + 0.5) / count, each) for place, each in enumerate(selected)]
    calls.sort(key=lambda pair: pair[0])
    return tuple({str(made): made for _, made in calls}.values())


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


def _standard(op: str, dtype: str, platform: str) -> Iterator[Call]:
    """The standard calls of an op in a dtype, as `standard_shapes.toml` has them; none where it has none."""
    if op not in _BUILDERS:
        return
    table, build = _BUILDERS[op]
    for part in _tables()[table]["cuda" if platform == "cuda" else "other"]:
        for arguments in _combinations(part):
            yield build(**({"dtype": dtype} | arguments))


def _combinations(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each call of a table's part: every combination of what its lists hold."""
    for case in part.get("cases", ({},)):
        merged = {name: value for name, value in {**part, **case}.items() if name != "cases"}
        lists = [(names.split(), value) for names, value in merged.items() if isinstance(value, list)]
        fixed = {name: value for name, value in merged.items() if not isinstance(value, list)}
        for values in itertools.product(*(value for _, value in lists)):
            arguments = dict(fixed)
            for (names, _), value in zip(lists, values, strict=True):
                arguments |= zip(names, value if len(names) > 1 else (value,), strict=True)
            yield {n: tuple(value) if isinstance(value, list) else value for n, value in arguments.items()}


@functools.cache
def _tables() -> dict[str, dict[str, list[dict[str, Any]]]]:
    return tomllib.loads(Path(__file__).with_name("standard_shapes.toml").read_text("utf-8"))


def _attention(**arguments: Any) -> Call:
    """`attention` with as many keys as queries, where nothing else is said."""
    return attention(**({"sk": arguments["sq"]} | arguments))


# Of each op its table in the file, and what makes a call of one of its rows.
_BUILDERS: dict[str, tuple[str, Callable[..., Call]]] = {
    "attention": ("attention", _attention),
    "paged_attention": ("paged_attention", paged_call),
    "ragged_attention": ("ragged_attention", ragged_call),
    **{
        op: ("norm", functools.partial(norm, op))
        for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
    },
    "linear": ("linear", linear),
    "mlp": ("mlp", mlp),
    "rope": ("rope", rope),
    "embedding": ("embedding", embedding),
    "sample": ("sample", sample),
}
