"""Calls that no search has seen: drawn by a fixed seed from the ranges of serving.

They stand beside the listed shapes of `benchmarks/regret_shapes.py`. Choices are judged by them and nothing
is fitted to them: neither the seed nor the ranges change with what a run shows. A set whose result was read
and answered by a change is blind no longer: its seed moves to `SEEN`, and another set is drawn.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import msgspec

from layerzero.measure.calls import Call
from layerzero.measure.shapes import attention, norm, paged_call, ragged_call, sample

# The seeds of sets whose results were read, and of the one that nobody has looked at.
SEEN = (20_261_122,)
SEED = 20_261_123
COUNT = 40
# Sampling and norms, so many of each.
OTHERS = 4
NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
# In turns, so that the first of them are a fair sample.
KINDS = (
    "decode",
    "prefill",
    "full",
    "paged decode",
    "decode",
    "cross",
    "prefill",
    "window",
    "chunk",
    "ragged",
)

Range = tuple[int, int]


class Ranges(msgspec.Struct, frozen=True):
    """Where sizes are drawn from, evenly in octaves; a call beyond the limits is drawn again.

    `rows` are queries of a prefill, `batch` and `context` sequences and tokens of a decode, `sampled` and
    `normed` rows of sampling and norms; a `width` is a multiple of 64.
    """

    dtypes: tuple[str, ...]
    heads_of_keys: tuple[int, ...]
    group: tuple[int, ...]
    head_dim: tuple[int, ...]
    rows: Range
    prefills: Range
    batch: Range
    context: Range
    max_heads: int
    max_bytes: int
    max_flops: float
    sampled: Range
    vocabulary: Range
    normed: Range
    width: Range


RANGES = {
    # One call in eight in half precision's other type.
    "cuda": Ranges(
        dtypes=("bfloat16",) * 7 + ("float16",), heads_of_keys=(1, 2, 4, 8, 12, 16, 32),
        group=(1, 1, 2, 4, 5, 7, 8), head_dim=(64, 96, 128, 128, 256), rows=(128, 32_768), prefills=(1, 16),
        batch=(1, 256), context=(512, 131_072), max_heads=64, max_bytes=4 << 30, max_flops=2e13,
        sampled=(1, 256), vocabulary=(32_000, 262_144), normed=(1, 16_384), width=(128, 8192),
    ),
    "cpu": Ranges(
        dtypes=("float32", "bfloat16"), heads_of_keys=(1, 2, 4, 8, 12), group=(1, 1, 2, 4, 8),
        head_dim=(32, 64, 64, 128), rows=(16, 1024), prefills=(1, 8), batch=(1, 32), context=(64, 2048),
        max_heads=16, max_bytes=64 << 20, max_flops=4e9,
        sampled=(1, 32), vocabulary=(4000, 64_000), normed=(1, 2048), width=(128, 4096),
    ),
}  # fmt: skip


def blind(platform: str) -> list[tuple[str, Call]]:
    """Forty attention calls and eight others by group, the same ones every time."""
    return [*drawn(platform, SEED), *_others(platform, SEED)]


def seen(platform: str) -> list[tuple[str, Call]]:
    """The calls of the sets that were blind once."""
    return [named for seed in SEEN for named in drawn(platform, seed)]


def drawn(platform: str, seed: int) -> list[tuple[str, Call]]:
    """The attention calls of one seed."""
    draw, ranges = random.Random(seed), RANGES[platform]
    # Every head size has its share, whatever is drawn again.
    sizes = draw.sample(ranges.head_dim, COUNT, counts=[COUNT // len(ranges.head_dim)] * len(ranges.head_dim))
    found: dict[str, tuple[str, Call]] = {}
    while len(found) < COUNT:
        kind = KINDS[len(found) % len(KINDS)]
        call = _drawn(draw, kind, sizes[len(found)], ranges)
        if call is not None:
            name = kind if kind.startswith("paged") or kind == "ragged" else f"attention {kind}"
            found.setdefault(str(call), (name if platform == "cuda" else f"{name} {_dtype(call)}", call))
    return list(found.values())


def _others(platform: str, seed: int) -> list[tuple[str, Call]]:
    draw, ranges = random.Random(f"{seed} others"), RANGES[platform]
    found: dict[str, tuple[str, Call]] = {}
    while len(found) < 2 * OTHERS:
        if len(found) % 2:
            op, rows, width = draw.choice(NORMS), _size(draw, *ranges.normed), _size(draw, *ranges.width)
            call, name = norm(op, rows, width // 64 * 64, draw.choice(ranges.dtypes)), "norms"
        else:
            call, name = sample(_size(draw, *ranges.sampled), _size(draw, *ranges.vocabulary)), "sampling"
        found.setdefault(str(call), (name if platform == "cuda" else f"{name} {_dtype(call)}", call))
    return list(found.values())


def _size(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _drawn(draw: random.Random, kind: str, d: int, ranges: Ranges) -> Call | None:
    """One call of a kind; None where it would be too large."""

    size = functools.partial(_size, draw)
    hk, group = draw.choice(ranges.heads_of_keys), draw.choice(ranges.group)
    dtype = draw.choice(ranges.dtypes)
    b, sq, sk = 1, 1, size(*ranges.context)
    causal = kind in ("prefill", "window", "chunk", "ragged")
    if kind in ("decode", "paged decode"):
        b = size(*ranges.batch)
    else:
        b, sq = size(*ranges.prefills), size(*ranges.rows)
    if kind in ("prefill", "full", "window", "ragged"):
        sk = sq
    if kind == "chunk":
        sq = max(2, min(sq, sk // 2))
    left, page = size(16, max(17, sk // 2)), draw.choice((1, 16, 64))
    hq = hk * group
    seen = (1 - sq / (2 * sk) if causal and sq <= sk else 1) * sk
    too_large = hq > ranges.max_heads or 4.0 * b * hq * sq * seen * d > ranges.max_flops
    if too_large or 2 * b * (hq * sq + 2 * hk * sk) * d * (2 if dtype == "float32" else 1) > ranges.max_bytes:
        return None
    made: dict[str, Callable[[], Call]] = {
        "paged decode": lambda: paged_call(b, hq, hk, sk, d, page, dtype),
        "ragged": lambda: ragged_call(b, hq, hk, sq, d, dtype),
        "window": lambda: attention(b, hq, hk, sq, sq, d, dtype, window=(left, 0)),
    }
    return made.get(kind, lambda: attention(b, hq, hk, sq, sk, d, dtype, causal=causal))()


def _dtype(call: Call) -> str:
    return str(next(getattr(v, "dtype", "") for v in call.args.values()))
