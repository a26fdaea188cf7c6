"""Attention calls of several callers as one launch: calls of one shape are joined along the batch axis.

Callers' operands are often views into one earlier output, a fused projection of all their tokens. Where
such views are equally spaced, the joined operand is a strided view of that output and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import table
from layerzero.ops.attention.arguments import AttentionArgs, RaggedArgs
from layerzero.ops.batching import apart, concat_rows, split_outputs, split_pieces
from layerzero.ops.op import Args, Batching, Launcher, LaunchFunction


def as_strided_batch(pieces: Sequence[Tensor]) -> Tensor | None:
    """One view of all `pieces` along axis 0, if they are equally spaced in one storage; else None.

    Pieces are (b_i, ...) with equal inner shapes and strides. Each entry along axis 0 has to have the same
    number of bytes behind the one before it, across pieces too.
    """
    first = pieces[0]
    shape, inner = first.shape[1:], first.stride()[1:]
    start = first.data_ptr()
    size = first.element_size()
    step = first.stride(0) * size if first.shape[0] > 1 else pieces[1].data_ptr() - start
    if step < 0 or step % size:
        return None
    count = 0
    for piece in pieces:
        rows = piece.shape[0]
        if (
            piece.data_ptr() != start + count * step
            or piece.shape[1:] != shape
            or piece.stride()[1:] != inner
            or (rows > 1 and piece.stride(0) * size != step)
        ):
            return None
        count += rows
    if pieces[-1].untyped_storage()._cdata != first.untyped_storage()._cdata:
        return None
    return first.as_strided((count, *shape), (step // size, *inner))


# Operand bytes of one call up to which gathering it costs less than the launch it saves. Estimates:
# on a CPU the copy is paid in its own caches' bandwidth, on a GPU these bytes are copied within one launch.
GATHER_BYTES = {"cpu": 1 << 18}
GATHER_BYTES_OTHER_DEVICES = 1 << 23


@dataclass(frozen=True, slots=True)
class StackedBatching(Batching):
    """Calls of one (Sq, Sk) become one launch; other lengths in the same group get their own.

    Calls with a mask, a score modifier, dropout or slopes per sequence run alone, and large ones to copy.
    """

    @property
    def concat_positions(self) -> Container[int]:
        """Queries, keys and values."""
        return range(3)

    def compatibility(self, args: Args) -> Hashable | None:
        """Everything but lengths: dtype, device, heads, head sizes."""
        q, k, v, mask, dropout_p, slopes, layout = (args[i] for i in (0, 1, 2, 3, 6, 9, 10))
        if mask is not None or dropout_p or (slopes is not None and slopes.dim() != 1):
            return None
        if args[15] is not None or args[16] is not None:  # functions of the batch index
            return None
        if args[18] is not None and args[18].dim() > 1:  # scales of a caller's own tokens
            return None
        heads = 1 if layout == "BHSD" else 2
        return q.dtype, k.dtype, v.dtype, q.device, q.shape[heads], k.shape[heads], q.shape[3], v.shape[3]

    def batch_cost(self, args: Args) -> tuple[int, int]:
        """(query tokens, operand bytes)."""
        q, k, v = args[0], args[1], args[2]
        tokens = q.shape[0] * q.shape[2 if args[10] == "BHSD" else 1]
        return tokens, sum(t.numel() * t.element_size() for t in (q, k, v))

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One launch for each (Sq, Sk), callers in order along the batch axis of each."""
        if len(calls) == 1:
            return [launch(calls[0])]
        tokens = 2 if calls[0][10] == "BHSD" else 1
        parts: dict[tuple[int, int], list[int]] = {}
        for index, args in enumerate(calls):
            parts.setdefault((args[0].shape[tokens], args[1].shape[tokens]), []).append(index)
        if len(parts) > 1:
            ragged = _run_ragged(calls, len(parts), launch)
            if ragged is not None:
                return ragged
        results: list[Any] = [None] * len(calls)
        for members in parts.values():
            shape_results = self._run_same_shape([calls[i] for i in members], launch)
            for index, result in zip(members, shape_results, strict=True):
                results[index] = result
        return results

    def _run_same_shape(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        if len(calls) == 1:
            return [launch(calls[0])]
        merged: list[Tensor] = []
        for position in range(3):
            pieces = [args[position] for args in calls]
            combined = as_strided_batch(pieces)
            if combined is None:
                if self.batch_cost(calls[0])[1] > GATHER_BYTES.get(
                    pieces[0].device.type, GATHER_BYTES_OTHER_DEVICES
                ):
                    return [launch(args) for args in calls]
                combined = torch.cat(pieces)
            merged.append(combined)
        out = launch((*merged, *calls[0][3:]))
        counts = [args[0].shape[0] for args in calls]
        return split_outputs(out, counts)


def _run_ragged(calls: Sequence[Args], shapes: int, launch: LaunchFunction) -> list[Any] | None:
    """All calls as one ragged launch, sequences concatenated; None where that costs more or differs.

    Only for one sequence a call in token-major layout: there the callers' rows, views of one projection, are
    already contiguous, and so are the rows that go back to them.
    """
    first, op = AttentionArgs._make(calls[0]), table.get("ragged_attention")
    options = (first.alibi_slopes, first.window, first.softcap, first.sinks, first.k_scale)
    if first.layout != "BSHD" or first.return_lse or any(option is not None for option in options):
        return None
    if (
        not isinstance(launch, Launcher)
        or not launch.is_unconstrained
        or any(args[0].shape[0] != 1 for args in calls)
    ):
        return None
    lengths = [args[0].shape[1] for args in calls]
    lengths_k = [args[1].shape[1] for args in calls]
    offsets = _cu_seqlens(lengths, first.q.device)
    offsets_k = offsets if lengths == lengths_k else _cu_seqlens(lengths_k, first.k.device)
    q, k, v = (concat_rows([args[position].squeeze(0) for args in calls]) for position in range(3))
    merged = tuple(RaggedArgs(q, k, v, offsets, offsets_k, first.is_causal, first.scale))
    longest = max(calls, key=lambda args: args[0].shape[1] * args[1].shape[1])
    if launch.expected_us(merged, op) >= shapes * launch.expected_us(longest):
        return None
    out: Tensor = launch(merged, op)
    return [apart(piece.unsqueeze(0)) for piece in split_pieces(out, lengths)]


def _cu_seqlens(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
