"""FlashAttention: one reading of the op's arguments, flags as each generation spells them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.flash_attn import fa4
from layerzero.backends.flash_attn.shared import flags
from layerzero.ops import host_copies, table
from layerzero.ops.attention.adapters import bounds, takes
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs


@pytest.mark.parametrize(
    ("kind", "op"),
    [(AttentionArgs, "attention"), (RaggedArgs, "ragged_attention"), (PagedArgs, "paged_attention")],
)
def test_calls_are_read_as_the_op_writes_them(kind: Any, op: str) -> None:
    """The fields are the names of the op's own arguments, in its order."""
    names = list(inspect.signature(table.get(op).build).parameters)
    assert names == list(kind._fields)


def dense(**named: Any) -> AttentionArgs:
    """A small call of `attention`."""
    q = torch.zeros(1, 3, 2, 8)
    args = table.get("attention").build(q, q, q, layout="BSHD", **named)[1]
    return AttentionArgs._make(args)


def test_a_kernel_sees_every_argument_by_its_name() -> None:
    """The record holds all that the op hands over."""
    seen: list[AttentionArgs] = []

    @takes(AttentionArgs)
    def kernel(call: AttentionArgs) -> Tensor:
        seen.append(call)
        return call.q

    q = torch.zeros(1, 3, 2, 8)
    args = table.get("attention").build(q, q, q, is_causal=True, layout="BSHD", return_lse=True)[1]
    assert kernel(*args) is q
    assert seen[0] == args
    assert (seen[0].is_causal, seen[0].layout, seen[0].return_lse) == (True, "BSHD", True)


def test_windows_as_each_generation_spells_them() -> None:
    """-1 for no bound in the second and third, None in the fourth; causal and a window are one window."""
    assert flags(dense(is_causal=True))["window_size"] == (-1, -1)
    assert flags(dense(window=(5, 2)))["window_size"] == (5, 2)
    assert fa4._flags(dense(is_causal=True)) == {
        "softmax_scale": None, "softcap": 0.0, "causal": True, "window_size": (None, None),
    }  # fmt: skip
    assert fa4._flags(dense(window=(5, -1)))["window_size"] == (5, None)
    both = fa4._flags(dense(is_causal=True, window=(5, 2)))
    assert both["window_size"] == (5, 0) and "causal" not in both


def test_bounds_of_sequences_need_no_device_where_a_host_copy_is_known() -> None:
    """The longest sequence, or all rows where that would ask the device."""
    offsets = torch.tensor([0, 2, 2, 12])
    q = torch.zeros(12, 2, 8)
    args = table.get("ragged_attention").build(q, q, q, offsets)[1]
    assert bounds(RaggedArgs._make(args))[2:] == (12, 12)
    known = host_copies.attach_host_copy(offsets.clone(), offsets)
    args = table.get("ragged_attention").build(q, q, q, known)[1]
    starts, _, most, _ = bounds(RaggedArgs._make(args))
    assert most == 10
    assert starts.dtype == torch.int32 and starts.tolist() == [0, 2, 2, 12]
