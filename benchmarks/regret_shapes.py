"""The shapes that regret is measured on: those of serving, held out, blind and tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

from benchmarks.regret_blind import blind, seen
from layerzero.measure.calls import Call
from layerzero.measure.shapes import (
    attention,
    linear,
    mlp,
    norm,
    paged_call,
    ragged_call,
    rope,
    sample,
    standard_calls,
)

Named = tuple[str, Call]  # the group a shape is reported under, and the call
Part = Literal["held out", "blind", "tuned"]
PARTS: tuple[Part, ...] = get_args(Part)  # in the order in which they are measured


class Shape(NamedTuple):
    """A call, the group it is reported under, and what it proves: listed or drawn, tuned or not."""

    group: str
    call: Call
    part: Part


def shapes(platform: str, quick: bool = False) -> list[Shape]:
    """The listed shapes that are held out, then those drawn, then the tuned ones.

    Groups stand in turns, so that a run that ends early has seen all of them. A listed shape is tuned where
    it is one of the standard shapes that `lz.tune` measures; the others are held out, and so are the drawn
    ones that were blind once.
    """
    covered = set(map(str, standard_calls(None, platform)))
    groups: dict[str, list[Call]] = {}
    for name, call in (*(_gpu() if platform == "cuda" else _cpu()), *seen(platform)):
        groups.setdefault(name, []).append(call)
    parts: dict[Part, dict[str, list[Shape]]] = {part: {} for part in PARTS}
    for name, calls in groups.items():
        for call in calls[: 2 if quick else None]:
            part: Part = "tuned" if str(call) in covered else "held out"
            parts[part].setdefault(name, []).append(Shape(name, call, part))
    known = covered | {str(call) for calls in groups.values() for call in calls}
    drawn = [Shape(name, call, "blind") for name, call in blind(platform) if str(call) not in known]
    parts["blind"] = {"in turns already": drawn[: 2 if quick else None]}
    return [shape for own in parts.values() for shape in _in_turns(own.values())]


def asked(found: Sequence[Shape], parts: Sequence[str] | None) -> list[Shape]:
    """The shapes of the named parts; "held out, norms" are those of a part whose group begins so.

    Raises: ValueError: a name that no shape has.
    """
    if parts is None:
        return list(found)
    wanted = [(part.strip(), group.strip()) for part, _, group in (name.partition(",") for name in parts)]
    own = [[s for s in found if s.part == part and s.group.startswith(group)] for part, group in wanted]
    for name, kept in zip(parts, own, strict=True):
        if not kept:
            raise ValueError(f"parts needs one of {PARTS} or 'PART, GROUP', got {name!r}, which no shape has")
    names = {str(shape.call) for kept in own for shape in kept}
    return [shape for shape in found if str(shape.call) in names]


def _in_turns(groups: Iterable[list[Shape]]) -> list[Shape]:
    return [shape for turn in zip_longest(*groups) for shape in turn if shape is not None]


def _gpu() -> Iterator[Named]:
    yield from _gpu_prefill()
    yield from _gpu_decode()
    crossed = ((2, 32, 8, 4096, 77, 64), (6, 20, 20, 900, 77, 64), (4, 24, 24, 4096, 77, 96))
    for b, hq, hk, sq, sk, d in (*crossed, (1, 32, 8, 200, 7000, 128), (2, 16, 16, 512, 1500, 64)):
        yield "attention cross", attention(b, hq, hk, sq, sk, d, causal=False)
    for sq, left in ((2500, 255), (4096, 1023), (9000, 4095), (12000, 1023)):
        yield "attention window", attention(1, 32, 8, sq, sq, 128, window=(left, 0))
    for b, hq, hk, sq, d in ((1, 32, 8, 1100, 128), (2, 12, 12, 600, 64)):
        yield "attention fp16", attention(b, hq, hk, sq, sq, d, "float16")
        yield "attention fp16", attention(b, hq, hk, 1, 4 * sq, d, "float16", causal=False)
    for b, length, hq, hk, d in ((3, 800, 32, 8, 128), (16, 256, 32, 8, 128), (40, 90, 32, 32, 64),
                                 (1, 5000, 32, 8, 128)):  # fmt: skip
        yield "ragged", ragged_call(b, hq, hk, length, d)
    for page in (1, 16, 64):
        for b, context, hq, hk in ((1, 2600, 32, 8), (16, 1024, 32, 8), (64, 4096, 32, 8), (20, 800, 64, 8),
                                   (100, 600, 32, 8), (8, 18000, 32, 8)):  # fmt: skip
            yield "paged decode", paged_call(b, hq, hk, context, 128, page)
    yield "paged prefill", paged_call(4, 32, 8, 2048, 128, 16, queries=512)
    yield "paged prefill", paged_call(3, 32, 8, 2600, 128, 16, queries=150)
    for rows, width in ((1, 4096), (20, 4096), (256, 8192), (2500, 5120), (16384, 2048), (120, 1536)):
        for op in ("rms_norm", "add_rms_norm", "layer_norm"):
            yield "norms", norm(op, rows, width)
    for n in (1, 20, 600, 6000):
        yield "rope", rope(n, 32, 8, 128)
        yield "activation", mlp(max(n // 4, 1), 4096, 11008)
    for n in (1, 20, 150, 2500):
        yield "linear", linear(n, 4096, 6144)
        yield "linear", linear(n, 8192, 4096)
    for n in (1, 20, 100):
        yield "sampling", sample(n, 151_936)
        yield "sampling", sample(n, 50_257)


def _gpu_prefill() -> Iterator[Named]:
    for hq, hk, d in ((32, 8, 128), (16, 16, 64), (40, 8, 128), (16, 8, 256), (24, 24, 96)):
        for b, sq in ((1, 128), (1, 350), (2, 900), (1, 2600), (6, 600)):
            yield "attention prefill", attention(b, hq, hk, sq, sq, d)
    for sq in (2048, 8192, 14000, 32768):
        yield "attention prefill", attention(1, 32, 8, sq, sq, 128)
    for b, hq, sq, d in ((2, 24, 3600, 64), (24, 12, 150, 64), (1, 16, 1200, 64), (12, 16, 577, 64)):
        yield "attention full", attention(b, hq, hq, sq, sq, d, causal=False)


def _gpu_decode() -> Iterator[Named]:
    for hq, hk, d in ((32, 8, 128), (32, 32, 64), (40, 8, 128), (16, 8, 256)):
        for b, sk in ((1, 512), (1, 7000), (5, 1800), (20, 2800), (64, 4096), (200, 700)):
            yield "attention decode", attention(b, hq, hk, 1, sk, d, causal=False)
    yield "attention decode", attention(1, 32, 8, 1, 131072, 128, causal=False)
    yield "attention decode", attention(2, 32, 8, 1, 45000, 128, causal=False)
    yield "attention chunk", attention(1, 32, 8, 300, 4096, 128)
    yield "attention chunk", attention(4, 32, 8, 20, 2600, 128)


def _cpu() -> Iterator[Named]:
    for dtype in ("float32", "bfloat16"):
        yield from _cpu_attention(dtype)
        yield from _cpu_rows(dtype)
    for n in (1, 12):
        yield "sampling float32", sample(n, 8000)


def _cpu_attention(dtype: str) -> Iterator[Named]:
    for hq, hk, d in ((12, 12, 32), (12, 12, 64), (8, 2, 64), (8, 1, 128)):
        for b, sq in ((1, 16), (1, 100), (4, 48), (1, 400)):
            causal = hq != 12
            yield f"attention prefill {dtype}", attention(b, hq, hk, sq, sq, d, dtype, causal=causal)
        for b, sk in ((1, 128), (1, 700), (6, 300), (16, 512)):
            yield f"attention decode {dtype}", attention(b, hq, hk, 1, sk, d, dtype, causal=False)
    for b, hq, sq, sk in ((1, 8, 256, 77), (2, 12, 32, 300)):
        yield f"attention cross {dtype}", attention(b, hq, hq, sq, sk, 64, dtype, causal=False)
    yield f"attention window {dtype}", attention(1, 8, 2, 512, 512, 64, dtype, window=(63, 0))
    for b, length in ((3, 40), (6, 100)):
        yield f"ragged {dtype}", ragged_call(b, 8, 2, length, 64, dtype)
    for page in (1, 16, 64):
        for b, context in ((1, 700), (8, 300), (16, 1024)):
            yield f"paged decode {dtype}", paged_call(b, 8, 2, context, 64, page, dtype)


def _cpu_rows(dtype: str) -> Iterator[Named]:
    for rows, width in ((1, 384), (24, 768), (300, 1024), (2048, 384)):
        for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
            yield f"norms {dtype}", norm(op, rows, width, dtype)
    for n in (1, 24, 200):
        yield f"rope {dtype}", rope(n, 8, 2, 64, dtype)
        yield f"activation {dtype}", mlp(n, 384, 1536, dtype, "gelu")
        yield f"activation {dtype}", mlp(n, 512, 1024, dtype)
        yield f"linear {dtype}", linear(n, 384, 1152, dtype)
        yield f"linear {dtype}", linear(n, 768, 768, dtype)
