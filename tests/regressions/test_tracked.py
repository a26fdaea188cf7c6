"""What the garbage collector walks for what is remembered: a full collection falls into somebody's call."""

from __future__ import annotations

import gc

import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.spec.settings import Settings

ATTENTION = ops_table.get("attention")
CALLS = 300
# A plan, what compares its first run, and a set of features.
EACH = 4


def test_a_remembered_call_leaves_few_objects_to_walk() -> None:
    """Verdicts on every kernel are kept with each choice, and are none of the collector's business."""
    own = LocalDevice("cpu", Settings(), Registry(load_builtin(), lambda _: []))
    built = [
        ATTENTION.build(*(torch.empty(1, 1 + n % 10, 1 + n // 10, 64) for _ in range(3)))
        for n in range(CALLS + 1)
    ]
    bits = mode_bits()
    own.plan(ATTENTION, *built[-1], bits)  # what a first call makes, once
    gc.collect()
    before = len(gc.get_objects())
    plans = [own.plan(ATTENTION, *one, bits) for one in built[:CALLS]]
    gc.collect()
    assert len(gc.get_objects()) - before <= EACH * CALLS
    assert all(len(plan.selection.trace) > 10 for plan in plans)
    own.close()
