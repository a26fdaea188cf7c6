"""The compiled programs of flex attention: one for each shape, what else changes between calls in tensors.

Blocks of scores in which no query sees a key are skipped, those in which all are seen are not masked.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import AttentionArgs
from layerzero.ops.attention.checks import window_bounds
from layerzero.ops.attention.masks import merge_block_mask
from layerzero.spec.call_spec import CallSpec

BLOCK = 128
# Further than any key: it means no bound.
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


# Which blocks of keys each block of queries sees, in part and in whole: how many, and which first.
Blocks = tuple[Tensor, Tensor, Tensor, Tensor]


def _blocks(visible: Tensor, whole: Tensor) -> Blocks:
    """From two (..., Sq / 128, Sk / 128) bool: blocks with anything to see, and those with all."""
    part = (visible & ~whole).int()
    full = (visible & whole).int()
    some, whole_first = (each.argsort(dim=-1, descending=True, stable=True).int() for each in (part, full))
    return part.sum(-1).int(), some, full.sum(-1).int(), whole_first


@functools.lru_cache(maxsize=256)
def _band(queries: int, keys: int, window_left: int, right: int) -> tuple[Tensor, Tensor]:
    """(visible, whole) of the blocks of a band around the diagonal, (1, 1, Sq / 128, Sk / 128)."""
    first = torch.arange(queries // BLOCK, device="cpu")[:, None] * BLOCK + keys - queries
    column = torch.arange(keys // BLOCK, device="cpu") * BLOCK
    # The key nearest behind the last query of a block, and furthest ahead of the first one.
    lowest, highest = column - (first + BLOCK - 1), column + BLOCK - 1 - first
    visible = (lowest <= right) & (highest >= -window_left)
    whole = (highest <= right) & (lowest >= -window_left)
    return visible[None, None], whole[None, None]


_plain_blocks = functools.lru_cache(maxsize=256)(lambda *band: _blocks(*_band(*band)))


def _masked_blocks(mask: Tensor, band: tuple[int, int, int, int]) -> Blocks:
    """The blocks of a contiguous bool mask (B, Hq, Sq, Sk) inside a band."""
    batch, heads, queries, keys = mask.shape
    tiles = mask.view(batch, heads, queries // BLOCK, BLOCK, keys // BLOCK, BLOCK)
    visible, whole = _band(*band)
    return _blocks(tiles.any(-1).any(-2) & visible, tiles.all(-1).all(-2) & whole)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, ends: Tensor,
    numbers: Tensor, slopes: Tensor, mask: Tensor | None, softcap: bool,
) -> Tensor:  # fmt: skip
    """`flex_attention` with everything that changes between calls of one shape in tensors.

    `ends`: how far left and right a query sees, keys before the first one; `numbers`: scale and soft cap.
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

    sizes = (q.shape[2], k.shape[2])
    table = BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=sizes, compute_q_blocks=False
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
        program = self._made.get(shape)
        if program is not None:
            return program
        with self._lock:
            if shape not in self._made:
                self._made[shape] = _compiled(shape)
            return self._made[shape]


def _compiled(shape: Shape) -> Callable[..., Tensor]:
    # torch counts programs by code object and stops at a few: each shape has a code object of its own.
    renamed = types.FunctionType(_flex.__code__.replace(co_name="flex"), _flex.__globals__, "flex")
    options: dict[str, Any] = {"guard_filter_fn": lambda entries: [False] * len(entries)}
    program: Callable[..., Tensor] = torch.compile(renamed, dynamic=False, fullgraph=True, options=options)
    batch, heads, groups, queries, keys, width = shape[:6]
    shapes = ((batch, heads, queries, width), (batch, groups, keys, width), (batch, groups, keys, width))
    with torch.inference_mode(False), torch.no_grad():
        q, k, v = (torch.zeros(each, dtype=torch.float32, device="cpu") for each in shapes)
        mask = None
        if shape.masked:
            mask = torch.ones((batch, heads, queries, keys), dtype=torch.bool, device="cpu")
        attention_of(program, q, k, v, mask, (-1, -1), None, 1.0 if shape.softcap else None, None)
    return program


def attention_of(
    program: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    sides: tuple[int, int], scale: float | None, softcap: float | None, slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run a program on the operands of one call; `sides` are the keys left and right, -1 for no bound."""
    window_left, right = (side if side >= 0 else _FAR for side in sides)
    band = (q.shape[2], k.shape[2], window_left, right)
    blocks = _plain_blocks(*band) if mask is None else _masked_blocks(mask, band)
    ends = torch.tensor([window_left, right, k.shape[2] - q.shape[2]], device="cpu")
    # Slopes of zero cost less than a second program for each shape would.
    spread = q.new_zeros(q.shape[:2]) if slopes is None else slopes.float().expand(q.shape[:2]).contiguous()
    pair = [q.shape[3] ** -0.5 if scale is None else scale, softcap or 1.0]
    numbers = torch.tensor(pair, dtype=torch.float32, device="cpu")
    return program(q, k, v, blocks, ends, numbers, spread, mask, softcap is not None)


PROGRAMS = Programs()


@takes(AttentionArgs)
def attention(call: AttentionArgs) -> Tensor:
    """The program of the call's shape; a mask is spread over batch and heads."""
    q, k, v = (operand.resolve_neg() for operand in call[:3])  # a program reads memory
    batch, heads, queries, width = q.shape
    mask = call.attn_mask
    if call.block_mask is not None:
        mask = merge_block_mask(mask, call.block_mask, batch, heads)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, k.shape[2]).contiguous()
    sizes = (batch, heads, k.shape[1], queries, k.shape[2], width)
    program = PROGRAMS.get(Shape(*sizes, call.softcap is not None, mask is not None))
    sides = window_bounds(call.is_causal, call.window)
    with torch.no_grad():
        return attention_of(program, q, k, v, mask, sides, call.scale, call.softcap, call.alibi_slopes)


def build(request: CallSpec) -> None:
    """Compile what a call needs."""
    size = request.dim
    sizes = (size("B"), size("Hq"), size("Hk"), size("Sq"), size("Sk"), size("D"))
    masked = bool(request.features & {"mask_bool", "block_mask"})
    PROGRAMS.get(Shape(*sizes, "softcap" in request.features, masked))
