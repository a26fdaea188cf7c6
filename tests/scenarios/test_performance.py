"""What grows with what, counted in objects, bytes and threads; no test measures time."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import tracemalloc
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.backends import load_builtin
from layerzero.native import FAST_PATH
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")


def test_other_ops_kernels_are_never_looked_at() -> None:
    """PS-005: with 1,000 kernels of other ops registered, a decision judges its own op's and nothing else."""
    others = [kernel(f"k{n}.linear") for n in range(1000)]
    own = device([*others, kernel("a.rms_norm")])
    full = RMS.build(torch.ones(2, 8))[1]
    record = own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()
    assert [c.kernel for c in record.trace] == ["a.rms_norm"]
    assert own.registry.for_op("rms_norm") is own.registry.for_op("rms_norm")


def test_steady_traffic_hits() -> None:
    """PS-006: 20,000 calls over 150 shapes of skewed popularity are hits in more than 99 of 100 cases."""
    own = device([kernel("a.rms_norm")])
    draw = random.Random(7)
    shapes = [RMS.build(torch.empty(1 + n, 64)) for n in range(150)]
    popularity = [1 / (1 + n) for n in range(150)]
    hits = 0
    hot = own.table(RMS).by_signature[mode_bits()]
    for signature, full in draw.choices(shapes, popularity, k=20_000):
        hits += signature in hot
        own.plan(RMS, signature, full, mode_bits())
    assert hits > 0.99 * 20_000


def test_invalidating_makes_one_object() -> None:
    """PS-008 and PS-009: a change that concerns an op drops its whole table, of any size; others stay."""
    own = device([kernel("a.rms_norm"), kernel("b.rms_norm"), kernel("a.linear")])
    linear = ops_table.get("linear")
    for rows in range(1, 301):
        signature, full = RMS.build(torch.empty(rows, 8))
        own.plan(RMS, signature, full, mode_bits())
    kept = own.table(linear)
    old = own.table(RMS)
    own.set_policy(Policy((make_rule("deny", "a.rms_norm", op="rms_norm"),)))
    assert own.table(linear) is kept
    assert own.table(RMS) is not old
    assert not any(own.table(RMS).by_signature)
    assert len(old.by_signature[mode_bits()]) == 300


def test_25600_plans_fit() -> None:
    """PS-011: 25,600 remembered calls of one op take less than 100 MB."""
    own = device([kernel("a.rms_norm")], Settings(max_keys=60_000))
    tensor = torch.empty(160, 160 * 8)
    tracemalloc.start()
    try:
        for rows in range(1, 161):
            for width in range(1, 161):
                signature, full = RMS.build(tensor[:rows, : width * 8])
                own.plan(RMS, signature, full, mode_bits())
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(own.table(RMS).by_signature[mode_bits()]) == 25_600
    assert size < 100e6, size


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "python"])
def test_a_hit_leaves_nothing_behind(native: bool) -> None:
    """PS-012: 20,000 hits leave fewer memory blocks than one in a hundred of them would."""
    before_test = FAST_PATH.module
    try:
        FAST_PATH.use(FAST_PATH.load() if native else None)
        left, out = _blocks_of_hits(20_000)
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        FAST_PATH.use(before_test)
    assert left < 200
    assert out.shape == (2, 8)


def _blocks_of_hits(hits: int) -> tuple[int, torch.Tensor]:
    """The memory blocks that so many hits leave behind, and the last one's result."""
    with lz.start(Settings(warm="off")):
        x = torch.randn(2, 8)
        out = x
        for _ in range(200):
            out = layerzero.sync.rms_norm(x)
        before = sys.getallocatedblocks()
        for _ in range(hits):
            out = layerzero.sync.rms_norm(x)
        return sys.getallocatedblocks() - before, out


def _functions_of_a_crowd(steps: int = 20) -> int:
    """Functions entered, of Python and of C, while 64 callers await `steps` calls each."""
    weight, rows = torch.ones(8, 8), [torch.ones(1, 8) for _ in range(64)]
    entered = 0

    def count(_frame: Any, event: str, _function: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    async def caller(x: torch.Tensor) -> None:
        for _ in range(steps):
            await lz.linear(x, weight)

    async def crowd() -> None:
        for _ in range(2):
            await asyncio.gather(*map(caller, rows))
        sys.setprofile(count)
        try:
            await asyncio.gather(*map(caller, rows))
        finally:
            sys.setprofile(None)

    asyncio.run(crowd())
    return entered


@pytest.mark.parametrize("native", [True, False])
def test_an_awaited_call_does_as_much_whatever_else_is_known(native: bool) -> None:
    """Hundreds of kinds of calls, awaited and blocking, add no step to one of a crowd."""
    before = FAST_PATH.module
    try:
        FAST_PATH.load() if native else FAST_PATH.use(None)
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    try:
        with lz.start(Settings(warm="off")):
            alone = _functions_of_a_crowd()
            kinds = [(torch.ones(1 + n, 8), torch.ones(8, 8)) for n in range(300)]

            async def others() -> None:
                await asyncio.gather(*[lz.linear(*kind) for kind in kinds])

            asyncio.run(others())
            for kind in kinds:
                layerzero.sync.linear(*kind)
            assert _functions_of_a_crowd() < 1.5 * alone  # a batch may be cut where the machine is busy
    finally:
        FAST_PATH.use(before)


def test_a_hundred_kernels_are_small() -> None:
    """PS-014: describing and registering 100 kernels takes less than 10 MB."""
    tracemalloc.start()
    try:
        own = device([kernel(f"k{n}.rms_norm") for n in range(100)])
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(own.kernels()) == 100
    assert size < 10e6, size
    assert load_builtin()


def test_idle_means_no_thread() -> None:
    """PS-017: after calls that ran inline, a runtime has no thread, timer or poll of its own."""
    before = set(threading.enumerate())
    with lz.start(Settings(warm="off")):
        layerzero.sync.rms_norm(torch.randn(2, 8))
        assert set(threading.enumerate()) == before
