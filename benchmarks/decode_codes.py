"""Decoding over pages of codes on a GPU: scales laid out otherwise, other tiles, read by pages.

    python benchmarks/decode_codes.py --out FOLDER [--sizes 64x4096,...] [--codes float8_e4m3fn]
    python benchmarks/decode_codes.py --rehearse     # small, by Triton's interpreter: all arms agree

Sixteen bits, scales by head, scales by token, all captured, take turns in one run. A token's scales lie as
the pool has them, heads behind each other (a head's program uses 4 of each 32 bytes that it reads, a fourth
more traffic between L2 and the processors), or turned: a head's tokens of a page behind each other. `cuda` is
the kernel that is taken, with other texts (decode_sources.py) and blocks a processor; `rows` is our Triton
kernel, `pages` reads a table's entry once a page and a page's scales as vectors, both with cuts: tokens of a
tile, warps, stages (of 4, one tile is on its way; of 5, two), registers a thread at the most (0: any).
A number is the median of the rounds after the first; `over_sixteen_bits` is the 16-bit time over the arm's,
`share_of_copy` what it reads each second over what a large copy moves. Wanted are 1.7 and 0.85. The winner
belongs into decode.cu and `_BLOCKS`, or `_CODES` and `_decode` (triton_kernels/paged.py), turned scales into
`PagedCache._scales`: all that reads pools takes their steps.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from harness import environment, medians, show, write  # noqa: E402
from quantized_cuda import HEAD_DIM, HEADS, KEY_HEADS, PAGE, timed  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from benchmarks.decode_sources import VARIANTS, source  # noqa: E402
from layerzero.backends.cuda_kernels import compiled  # noqa: E402
from layerzero.backends.cuda_kernels import decode as cuda_decode  # noqa: E402
from layerzero.backends.triton_kernels import paged  # noqa: E402
from layerzero.formats.elements import encode_values  # noqa: E402
from layerzero.ops import kv_formats, table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decode_codes_h200.json"
CUTS = ((64, 4, 4, 0), (64, 4, 5, 128), (128, 8, 4, 128))
BLOCKS = (4, 3)
Cut = tuple[int, int, int, int]
Arm = tuple[str, Callable[..., Any], Callable[[], Any]]  # whose call, what runs it, what is in place then


@triton.jit(do_not_specialize=["tables_row"])
def decode_by_pages(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, best_ptr, weight_ptr, k_scale_ptr, v_scale_ptr,
    scale_log2,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head, tables_row,
    scale_page, scale_token, scale_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, CODES: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """As `paged._decode`, over codes, where a tile is whole pages."""
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lens_ptr + sequence)
    size = tl.cdiv(tl.cdiv(length, PARTS), TILE) * TILE
    first = part * size
    last = tl.minimum(first + size, length)
    rows, features = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads = head * GROUP + rows
    q = tl.load(
        q_ptr + sequence * q_row + heads[:, None] * q_head + features[None, :],
        mask=(rows < GROUP)[:, None], other=0.0,
    )  # fmt: skip
    if not BY_TOKEN:
        scale_log2 *= tl.load(k_scale_ptr + head * scale_head)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    pages, slots = tl.arange(0, TILE // PAGE), tl.arange(0, PAGE)
    tables_ptr += sequence * tables_row
    for start in range(first, last, TILE):
        tokens = start + pages[:, None] * PAGE + slots[None, :]
        begun = start + pages * PAGE < last
        page = tl.load(tables_ptr + start // PAGE + pages, mask=begun, other=0).to(tl.int64)[:, None]
        here = tokens < last
        inside = tl.reshape(here, (TILE,))
        k_places = tl.reshape(page * k_page + slots[None, :] * k_token, (TILE,)) + head * k_head
        v_places = tl.reshape(page * v_page + slots[None, :] * v_token, (TILE,)) + head * v_head
        if BY_TOKEN:
            places = page * scale_page + head * scale_head + slots[None, :] * scale_token
            whole = tl.broadcast_to(begun[:, None], (TILE // PAGE, PAGE))  # a vector has one mask
            k_scale = tl.load(k_scale_ptr + places, mask=whole, other=0.0)
            v_scale = tl.load(v_scale_ptr + places, mask=whole, other=0.0)
        k = tl.load(k_ptr + k_places[:, None] + features[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + v_places[:, None] + features[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype))) * scale_log2
        if BY_TOKEN:
            scores *= tl.reshape(k_scale, (1, TILE))
        scores = tl.where(inside[None, :], scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - largest[:, None]), tl.exp2(best - largest)
        weight, best = weight * shrink + tl.sum(weights, 1), largest
        if BY_TOKEN:
            weights *= tl.reshape(tl.where(here, v_scale, 0.0), (1, TILE))
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype))
    if not BY_TOKEN:
        mixed *= tl.load(v_scale_ptr + head * scale_head)
    offsets = (sequence * tl.num_programs(1) * GROUP + heads) * PARTS + part
    is_row = rows < GROUP
    if PARTS == 1:
        mixed = tl.where(weight[:, None] > 0.0, mixed / weight[:, None], 0.0)
    else:
        tl.store(best_ptr + offsets, best, mask=is_row)
        tl.store(weight_ptr + offsets, weight, mask=is_row)
    tl.store(
        out_ptr + offsets[:, None] * WIDTH + features[None, :], mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )  # fmt: skip


KERNELS = {"rows": paged._decode, "pages": decode_by_pages}


class Bounded:
    """A kernel whose threads have so many registers at the most."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self.kernel, self.named = kernel, {"maxnreg": registers} if registers else {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self.kernel[grid], **self.named)


def turned(scale: Tensor) -> Tensor:
    """The same scales, a page's tokens of one head behind each other."""
    return scale.transpose(1, 2).contiguous().transpose(1, 2)


class Pools:
    """Pages of numbers and of codes, and the calls over them by what shares a scale."""

    def __init__(self, sequences: int, context: int, codes: torch.dtype, device: torch.device) -> None:
        numbers = torch.float16 if device.type == "cpu" else torch.bfloat16
        count = -(-context // PAGE)
        shape = (sequences * count, PAGE, KEY_HEADS, HEAD_DIM)
        generator = torch.Generator(device).manual_seed(0)
        k, v = (torch.randn(shape, generator=generator, device=device).to(numbers) for _ in range(2))
        tables = torch.randperm(shape[0], generator=generator, device=device).view(sequences, count).int()
        lengths = torch.full((sequences,), context, device=device, dtype=torch.int32)
        q = torch.randn(sequences, HEADS, HEAD_DIM, generator=generator, device=device).to(numbers)
        element, op = kv_formats.ELEMENT_OF[codes], table.get("paged_attention")
        self.device = device
        self.calls = {"sixteen bits": op.build(q, k, v, tables, lengths)[1]}
        self.bytes = {"sixteen bits": 4 * k.numel()}
        for shared, of in {"head": (KEY_HEADS,), "token": shape[:-1]}.items():
            scale = (torch.rand(of, generator=generator, device=device) + 4.0) / element.max_value
            spread = kv_formats.broadcast_scale(scale, 4, 2)
            coded = [encode_values(pool.float() / spread, element) for pool in (k, v)]
            laid = {shared: scale} | ({"token, turned": turned(scale)} if shared == "token" else {})
            for name, each in laid.items():
                self.calls[name] = op.build(q, *coded, tables, lengths, k_scale=each, v_scale=each)[1]
                self.bytes[name] = 2 * k.numel() + (8 * scale.numel() if shared == "token" else 0)


def triton_arm(kernel: str, cut: Cut) -> Callable[[], Any]:
    """What puts a Triton kernel and its cut in place."""
    launched = Bounded(KERNELS[kernel], cut[3])
    return lambda: mock.patch.multiple(paged, _CODES=cut[:3], _decode=launched)


@contextmanager
def cuda_arm(variant: str, blocks: int) -> Iterator[None]:
    """A text of decode.cu and the blocks of a processor in place."""
    text, plain = source(variant), compiled._source
    function = functools.partial(compiled.function, VARIANT=list(VARIANTS).index(variant))
    with (
        mock.patch.object(compiled, "_source", lambda name: text if name == "decode.cu" else plain(name)),
        mock.patch.multiple(cuda_decode, function=function, _BLOCKS=blocks),
    ):
        yield


def arms_of(pools: Pools) -> dict[str, Arm]:
    """Every arm by its name."""
    arms: dict[str, Arm] = {"sixteen bits": ("sixteen bits", paged.paged_attention, nullcontext)}
    cuts = CUTS if pools.device.type == "cuda" else CUTS[::2]
    for call in pools.calls.keys() - {"sixteen bits"}:
        for kernel in KERNELS:
            for cut in cuts if call != "head" else cuts[:1]:
                arms[f"{call}: {kernel} {'x'.join(map(str, cut))}"] = (
                    call, paged.paged_attention, triton_arm(kernel, cut)
                )  # fmt: skip
        for variant in VARIANTS if pools.device.type == "cuda" else ():
            for blocks in BLOCKS if call != "head" else BLOCKS[:1]:
                arms[f"{call}: cuda {variant}, {blocks} blocks"] = (
                    call, cuda_decode.paged_attention, functools.partial(cuda_arm, variant, blocks)
                )  # fmt: skip
    return arms


def measure(pools: Pools, rounds: int) -> dict[str, dict[str, Any]]:
    """Every arm, the fastest first; an arm that fails has its error in place of a number."""
    found: dict[str, dict[str, Any]] = {}
    timers: dict[str, Callable[[], float]] = {}
    wanted: dict[str, Tensor] = {}
    arms = arms_of(pools)
    for name, (call, attend, placed) in arms.items():
        args = pools.calls[call]
        with placed():
            try:
                out = attend(*args)
                timers[name] = timed(pools.device, functools.partial(twice, attend, args))
            except Exception as error:  # a cut that does not compile or fit is a finding
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
                continue
        right = wanted.setdefault(call.split(",")[0], out).float()
        off = float((out.float() - right).abs().max() / right.abs().max())
        found[name] = {"differs": float(f"{off:.1e}")}
        if pools.device.type == "cpu" and call != "sixteen bits":
            truth = table.get("paged_attention").reference(*args).float()
            assert float((out.float() - truth).abs().max() / truth.abs().max()) < 1e-2, name
    copied = torch.empty(
        1 << (30 if pools.device.type == "cuda" else 20), dtype=torch.uint8, device=pools.device
    )
    timers["copy"] = timed(pools.device, functools.partial(torch.empty_like(copied).copy_, copied))
    us = {name: took / 2 for name, took in medians(timers, rounds).items()}
    copy = copied.numel() / us.pop("copy") * 1e6
    found["copy"] = {"bytes_per_s": round(copy)}
    for name, took in us.items():
        moved = pools.bytes[arms[name][0]] / took * 1e6
        found[name] |= {
            "us": round(took, 2), "over_sixteen_bits": round(us["sixteen bits"] / took, 3),
            "share_of_copy": round(moved / copy, 3),
        }  # fmt: skip
    return {name: found[name] for name in sorted(found, key=lambda name: found[name].get("us", 1e9))}


def twice(attend: Callable[..., Tensor], args: tuple[Any, ...]) -> None:
    """Two calls behind each other, so that what begins a graph counts half."""
    attend(*args)
    attend(*args)


def main() -> int:
    """Measure each size, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", default="64x4096")
    parser.add_argument("--codes", default="float8_e4m3fn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    record: dict[str, Any] = {
        "environment": environment(("layerzero-runtime", "torch", "triton")),
        "codes": given.codes, "sizes": {},
    }  # fmt: skip
    sizes, rounds = ("2x150", 1) if given.rehearse else (given.sizes, given.rounds)
    for variant in VARIANTS:
        source(variant)
    with lz.start(lz.Settings(device=device.type, inference=True, perfdb=None)), torch.inference_mode():
        for size in sizes.split(","):
            sequences, context = map(int, size.split("x"))
            pools = Pools(sequences, context, getattr(torch, given.codes), device)
            found = record["sizes"][size] = measure(pools, rounds)
            show(size, ("arm", "found"), [(name, str(row)) for name, row in found.items()])
            if not given.rehearse:
                write(given.out / RESULTS.name if given.out else RESULTS, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
