"""Flex attention out of torch on the CPU: windows, soft caps, ALiBi, block-sparse masks in one compiled loop.

Only blocks of 128 by 128 scores in which a query sees a key are computed, and no bias is written out. torch
compiles one C++ program for each shape, which takes seconds, so the kernel is ready by shape and takes few
lengths. On the CPU torch 2.13 has neither a gradient nor a log-sum-exp for it, and compiled for sizes that
change its programs do not always build (a symbol's name is replaced inside longer ones: `ks1` in `ks15`).
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.kernel import Capability, Efficiency, Kernel, OneOf, SameAs
from layerzero.ops.attention_checks import bounds
from layerzero.ops.masks import Window
from layerzero.ops.request import Request
from layerzero.reasons import Reason

BLOCK = 128
# Points of the grid that keys keep sizes on: there one key is one shape, and a plan whose program is compiled
# is never given a shape whose program is not. They also bound how many programs there can be.
LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Further than any key: what stands for no bound.
_FAR = 1 << 40


class Shape(NamedTuple):
    """What a program is compiled for."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    softcap: bool
    masked: bool


def _shape_of(request: Request) -> Shape:
    size, asks = request.dim, request.features
    return Shape(
        size("B"), size("Hq"), size("Hk"), size("Sq"), size("Sk"), size("D"),
        "softcap" in asks, "mask_bool" in asks,
    )  # fmt: skip


class Blocks(NamedTuple):
    """Which blocks of keys each block of queries sees in part and in whole: how many, and which first."""

    some: Tensor
    some_at: Tensor
    whole: Tensor
    whole_at: Tensor


def _blocks(visible: Tensor, whole: Tensor) -> Blocks:
    """From two (..., Sq / 128, Sk / 128) bool: blocks with anything to see, and those with all."""
    part = (visible & ~whole).int()
    full = (visible & whole).int()
    return Blocks(
        part.sum(-1).int(), part.argsort(dim=-1, descending=True, stable=True).int(),
        full.sum(-1).int(), full.argsort(dim=-1, descending=True, stable=True).int(),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _band(queries: int, keys: int, left: int, right: int) -> tuple[Tensor, Tensor]:
    """(visible, whole) of the blocks of a band around the diagonal, (1, 1, Sq / 128, Sk / 128)."""
    first = torch.arange(queries // BLOCK)[:, None] * BLOCK + keys - queries
    column = torch.arange(keys // BLOCK) * BLOCK
    # The key nearest behind the last query of a block, and furthest ahead of the first one.
    lowest, highest = column - (first + BLOCK - 1), column + BLOCK - 1 - first
    visible = (lowest <= right) & (highest >= -left)
    whole = (highest <= right) & (lowest >= -left)
    return visible[None, None], whole[None, None]


_plain_blocks = functools.lru_cache(maxsize=256)(lambda *band: _blocks(*_band(*band)))


def _masked_blocks(mask: Tensor, band: tuple[int, int, int, int]) -> Blocks:
    """The blocks of a contiguous bool mask (B, Hq, Sq, Sk) inside a band."""
    batch, heads, queries, keys = mask.shape
    tiles = mask.view(batch, heads, queries // BLOCK, BLOCK, keys // BLOCK, BLOCK)
    visible, whole = _band(*band)
    return _blocks(tiles.any(-1).any(-2) & visible, tiles.all(-1).all(-2) & whole)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Tensor, Tensor, Tensor, Tensor], ends: Tensor,
    numbers: Tensor, slopes: Tensor, mask: Tensor | None, softcap: bool,
) -> Tensor:  # fmt: skip
    """`flex_attention` with everything that changes between calls of one shape in tensors.

    `ends` are how far left and right a query sees and how many keys stand before the first query; `numbers`
    are the scale and the soft cap.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s * numbers[0]
        if softcap:
            s = numbers[1] * torch.tanh(s / numbers[1])
        return s - slopes[b, h] * (j - i - ends[2]).abs()

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = j - i - ends[2]
        near = (ahead <= ends[1]) & (ahead >= -ends[0])
        return near if mask is None else near & mask[b, h, i, j]

    table = BlockMask.from_kv_blocks(
        blocks[0],
        blocks[1],
        blocks[2],
        blocks[3],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(q.shape[2], k.shape[2]),
        compute_q_blocks=False,
    )
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(q, k, v, score_mod=score, block_mask=table, scale=1.0, enable_gqa=grouped)
    return out


class Programs:
    """The compiled programs by shape, one compiled at a time; a call waits for none but its own.

    torch's guards are dropped: the shape says all that a program depends on, and the tensors it was compiled
    with were all different ones, so that no later call finds two of its operands taken for one.
    """

    def __init__(self) -> None:
        self._made: dict[Shape, Callable[..., Tensor]] = {}
        self._lock = threading.Lock()

    def get(self, shape: Shape) -> Callable[..., Tensor]:
        """The program of a shape, compiled now where it is not."""
        found = self._made.get(shape)
        if found is not None:
            return found
        with self._lock:
            if shape not in self._made:
                self._made[shape] = _compiled(shape)
            return self._made[shape]


def _compiled(shape: Shape) -> Callable[..., Tensor]:
    # torch counts programs by code object and stops at a few: each shape has a code object of its own.
    own = types.FunctionType(_flex.__code__.replace(co_name="flex"), _flex.__globals__, "flex")
    options: dict[str, Any] = {"guard_filter_fn": lambda entries: [False] * len(entries)}
    program: Callable[..., Tensor] = torch.compile(own, dynamic=False, fullgraph=True, options=options)
    batch, heads, groups, queries, keys, width = shape[:6]
    q = torch.zeros(batch, heads, queries, width)
    k, v = (torch.zeros(batch, groups, keys, width) for _ in range(2))
    mask = torch.ones(batch, heads, queries, keys, dtype=torch.bool) if shape.masked else None
    with torch.no_grad():
        attention_of(program, q, k, v, mask, (-1, -1), None, 1.0 if shape.softcap else None, None)
    return program


def attention_of(
    program: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    sides: tuple[int, int], scale: float | None, softcap: float | None, slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run a program on the operands of one call; `sides` are the keys left and right, -1 for no bound."""
    left, right = (side if side >= 0 else _FAR for side in sides)
    band = (q.shape[2], k.shape[2], left, right)
    blocks = _plain_blocks(*band) if mask is None else _masked_blocks(mask, band)
    ends = torch.tensor([left, right, k.shape[2] - q.shape[2]])
    # Slopes of zero cost less than a second program for each shape would.
    spread = q.new_zeros(q.shape[:2]) if slopes is None else slopes.float().expand(q.shape[:2]).contiguous()
    numbers = torch.tensor([q.shape[3] ** -0.5 if scale is None else scale, softcap or 1.0])
    return program(q, k, v, tuple(blocks), ends, numbers, spread, mask, softcap is not None)


PROGRAMS = Programs()


def _attention() -> Callable[..., Any]:
    importlib.import_module("torch.nn.attention.flex_attention")

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: Window, softcap: float | None, alibi_slopes: Tensor | None, *_: Any,
    ) -> Tensor:  # fmt: skip
        """The program of the call's shape; a mask is spread over batch and heads."""
        batch, heads, queries, width = q.shape
        shape = Shape(
            batch, heads, k.shape[1], queries, k.shape[2], width,
            softcap is not None, attn_mask is not None,
        )  # fmt: skip
        if attn_mask is not None:
            attn_mask = attn_mask.expand(batch, heads, queries, k.shape[2]).contiguous()
        program = PROGRAMS.get(shape)
        with torch.no_grad():
            return attention_of(
                program, q, k, v, attn_mask, bounds(is_causal, window), scale, softcap, alibi_slopes
            )

    return attention


def _build(request: Request) -> None:
    PROGRAMS.get(_shape_of(request))


def _mask_bytes(request: Request) -> int:
    """The mask for every head, and which of its blocks are seen."""
    if "mask_bool" not in request.features:
        return 0
    return 2 * request.dim("B") * request.dim("Hq") * request.dim("Sq") * request.dim("Sk")


_FEATURES = frozenset(
    {
        "causal", "scale", "gqa", "window", "softcap", "alibi", "mask_bool", "mask_and_causal", "empty_rows",
    }
)  # fmt: skip

_MEASURED = "benchmarks/results/flex_cpu.json: causal 1024 beside sdpa_flash_cpu; the launch is an estimate"

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        id="torch.attention.flex",
        op="attention",
        backend="torch",
        capability=Capability(
            source="torch 2.13, _inductor/kernel/flex/flex_cpu.py; run against float64 on torch 2.13 CPU",
            platforms=frozenset({"cpu"}),
            isa=frozenset({"avx2"}),
            torch_min="2.13",
            dtypes=frozenset({"float32"}),
            features=_FEATURES,
            layouts=frozenset({"BHSD"}),
            contiguous=True,
            limits=(
                OneOf("B", BATCHES),
                OneOf("Sq", LENGTHS),
                OneOf("Sk", LENGTHS),
                SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER),
            ),
            gradient=False,
            autocast=False,
        ),
        load=_attention,
        workspace_bytes=_mask_bytes,
        efficiency=Efficiency(0.22, 0.5, 400.0, _MEASURED),
        rank=48,
        cold=True,
        unit=lambda request: " ".join(map(str, _shape_of(request))),
        build=_build,
    ),
)
