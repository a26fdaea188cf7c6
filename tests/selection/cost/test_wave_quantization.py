"""A call's load under one kernel: blocks run in waves, joined batches are copied, and prices follow both."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from layerzero.backends import load_builtin
from layerzero.measure.shapes import attention
from layerzero.ops import table as ops_table
from layerzero.perfdb import Measurement
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement
from layerzero.selection.cost.roofline import SHIPPED
from layerzero.selection.cost.wave_quantization import kernel_work_us, tile_waves_us
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import Kernel, Tiling

H200 = msgspec.structs.replace(hypothetical_gpu(90), threads=132)
KERNELS = {kernel.id: kernel for kernel in load_builtin()}
FOURTH, THIRD = KERNELS["flash_attn_4.attention.dense"], KERNELS["vllm_flash_attn_3.attention.varlen"]
PLAIN = Tiling(((64, 128), (128, 64)), packed=False, splits=False, source="a test")


def request(
    b: int,
    hq: int,
    hk: int,
    sq: int,
    sk: int,
    d: int = 64,
    *,
    causal: bool = False,
    window: int | None = None,
) -> CallSpec:
    left = (window, 0) if window is not None else None
    return attention(b, hq, hk, sq, sk, d, causal=causal, window=left).request(H200)


def one_block_us(rows: int, sk: int, d: int) -> float:
    return 4.0 * rows * sk * d / (H200.peak_flops["bfloat16"] / 132) * 1e6


@pytest.mark.parametrize(
    ("heads", "queries", "waves"), [(1, 1, 1), (1, 128, 1), (132, 128, 1), (133, 128, 2), (132, 129, 2)]
)
def test_the_last_wave_of_blocks_takes_as_long_as_a_full_one(heads: int, queries: int, waves: int) -> None:
    """One block more than there are multiprocessors takes twice as long, one row alone as long as a block."""
    found = tile_waves_us(PLAIN, request(1, heads, heads, queries, 1024), H200)
    assert found == pytest.approx(waves * one_block_us(128, 1024, 64))


def test_rows_of_a_block_follow_the_head_size() -> None:
    """The first head size that is large enough holds; beyond the last nothing is said."""
    assert tile_waves_us(PLAIN, request(1, 8, 8, 256, 512, 96), H200) == pytest.approx(
        one_block_us(64, 512, 96)
    )
    assert tile_waves_us(PLAIN, request(1, 8, 8, 256, 512, 256), H200) == 0.0


def test_packed_heads_share_blocks() -> None:
    """Thirty-two query heads over one head of keys fill a block where each alone would take one."""
    call = request(8, 32, 1, 4, 1024)
    packed = dataclasses.replace(PLAIN, packed=True)
    assert tile_waves_us(packed, call, H200) == pytest.approx(one_block_us(128, 1024, 64))
    assert tile_waves_us(PLAIN, call, H200) == pytest.approx(2 * one_block_us(128, 1024, 64))


def test_splitting_keys_fills_the_machine() -> None:
    """A kernel that splits spreads eight blocks over all multiprocessors; none is faster than even work."""
    call = request(1, 8, 8, 1, 8192)
    splits = dataclasses.replace(PLAIN, splits=True)
    whole = one_block_us(128, 8192, 64)
    assert tile_waves_us(PLAIN, call, H200) == pytest.approx(whole)
    assert tile_waves_us(splits, call, H200) == pytest.approx(whole * 8 / 132)


@pytest.mark.parametrize(("heads", "share"), [(132, 132 / 132), (264, 2.0), (396, 3.0)])
def test_full_waves_take_what_the_roofs_need(heads: int, share: float) -> None:
    """Where moving takes longer than computing, whole waves are no slower than the roofs."""
    roofs = 10.0 * share * one_block_us(128, 1024, 64)
    assert tile_waves_us(PLAIN, request(1, heads, heads, 1, 1024), H200, roofs) == pytest.approx(roofs)


def test_a_last_wave_of_few_blocks_costs_a_block_where_memory_is_the_roof() -> None:
    """Sixty blocks after a full wave move less than half of it, and take as long as one block alone."""
    block = one_block_us(128, 1024, 64)
    roofs = 1.6 * block * 192 / 132
    found = tile_waves_us(PLAIN, request(1, 192, 192, 1, 1024), H200, roofs)
    assert found == pytest.approx(1.6 * block + block)
    assert found > 1.1 * roofs


def test_under_a_causal_mask_blocks_end_together() -> None:
    """Half of the work of a square, never less than its longest block."""
    many, few = request(4, 132, 132, 1024, 1024, causal=True), request(1, 2, 2, 1024, 1024, causal=True)
    assert tile_waves_us(PLAIN, many, H200) == pytest.approx(4 * 8 / 2 * one_block_us(128, 1024, 64))
    assert tile_waves_us(PLAIN, few, H200) == pytest.approx(one_block_us(128, 1024, 64))


def test_what_is_not_known_adds_nothing() -> None:
    """A window, and a device whose multiprocessors nobody counted, leave the roofs alone."""
    assert tile_waves_us(PLAIN, request(1, 8, 8, 256, 256, causal=True, window=63), H200) == 0.0
    assert tile_waves_us(PLAIN, request(1, 8, 8, 256, 256), hypothetical_gpu(90)) == 0.0
    plain = dataclasses.replace(FOURTH, tiling=None)
    assert kernel_work_us(plain, request(1, 8, 8, 1, 8192), H200, 3.0) == 3.0


@pytest.mark.parametrize(
    ("call", "copied"),
    [
        (request(1, 8, 2, 16, 100), 0),
        (request(3, 8, 2, 16, 100), 2 * 3 * 64 * (8 * 16 + 2 * 2 * 100)),
        (request(3, 8, 2, 1, 100), 2 * 3 * 64 * (2 * 2 * 100)),
        (request(3, 8, 2, 16, 100).replace(layout="BSHD"), 0),
    ],
)
def test_joining_the_rows_of_a_batch_copies_them(call: CallSpec, copied: int) -> None:
    """Where heads stand before tokens; the copies are in the workspace, and reach 0.4 of the bandwidth."""
    assert THIRD.copied_bytes is not None and THIRD.workspace_bytes is not None
    assert THIRD.copied_bytes(call) == copied
    one = call.replace(layout="BSHD")
    assert THIRD.workspace_bytes(call) - THIRD.workspace_bytes(one) == copied
    roofs = 1e6
    found = kernel_work_us(THIRD, call, H200, roofs) - roofs
    assert found == pytest.approx(2e6 * copied / (0.4 * H200.bandwidth), rel=1e-6)


def test_few_blocks_of_the_memory_efficient_kernel_take_as_long_as_one() -> None:
    """Two heads of 769 rows are 26 blocks of 64: more of them take no longer, until the machine is full."""
    kernel = KERNELS["torch.attention.sdpa_efficient"]
    few, many = (kernel_work_us(kernel, request(b, 1, 1, 769, 769, 128), H200, 0.1) for b in (2, 10))
    assert few == many == pytest.approx(one_block_us(64, 769, 128))


@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.tiling is not None], ids=lambda k: k.id)
def test_a_tiling_says_where_it_is_written(kernel: Kernel) -> None:
    """Head sizes rise, so that the first that is large enough is the smallest, and the source is named."""
    assert kernel.tiling is not None and kernel.tiling.source
    sizes = [size for size, _ in kernel.tiling.rows]
    assert sizes == sorted(set(sizes)) and kernel.op == "attention"


def test_a_call_of_one_more_wave_is_priced_as_such() -> None:
    """Sixteen heads of 2,048 rows are two waves where twelve are one: far more than a third more time."""
    assert FOURTH.tiling is not None
    rows = []
    for heads in (1, 4, 32, 64):
        timed = attention(1, heads, heads, 2048, 2048, 64, causal=False)
        us = 1.2 * tile_waves_us(FOURTH.tiling, timed.request(H200), H200)
        measured = Measurement(
            case=timed.benchmark_case(H200),
            kernel=FOURTH.id,
            launch="graph",
            median_us=us,
            p95_us=us,
            variance=0.0,
            samples=9,
        )
        rows.append(SourcedMeasurement(measured, SHIPPED))
    model = MeasuredCosts(rows, KERNELS, H200)
    found = []
    for heads in (12, 16):
        call = request(1, heads, heads, 2048, 2048).replace(modes=frozenset({"capture"}))
        us, source = model(FOURTH, ops_table.get("attention").work(call), call, H200)
        assert source == "shipped table, interpolated"
        found.append(us)
    assert 1.6 < found[1] / found[0] < 2.1
