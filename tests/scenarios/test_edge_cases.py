"""Edge cases of sizes, strides, hardware, policy and memory, one test for each scenario of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_runtime
from layerzero.graphs.rehearsal import rehearsal
from layerzero.native import FAST_PATH
from layerzero.ops import table as ops_table
from layerzero.selection.key import KeyBuilder, grid
from layerzero.selection.modes import CAPTURE, mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.hardware import Hardware, probe
from layerzero.spec.reasons import Reason
from tests.kernels import device, kernel

ATTENTION = ops_table.get("attention")
RMS = ops_table.get("rms_norm")


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, with nothing loading behind it."""
    with lz.start(lz.Settings(warm="off")):
        yield


def agree(q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> int:
    """Compare every kernel that takes the call with the float64 reference; how many there were."""
    full = ATTENTION.build(q.double(), k.double(), v.double(), **flags)[1]
    truth = ATTENTION.reference(*full).to(q.dtype)
    takers = lz.select("attention", q, k, v, **flags).order
    for name in takers:
        out = layerzero.sync.attention(q, k, v, backend=name, **flags)
        torch.testing.assert_close(out, truth, atol=1e-5, rtol=1e-4)
    return len(takers)


def heads(batch: int, count: int, length: int, size: int) -> Tensor:
    return torch.randn(batch, count, length, size, generator=torch.Generator().manual_seed(length + size))


def test_one_token() -> None:
    """EC-002: a single token attends to itself, in every kernel."""
    q, v = heads(1, 2, 1, 16), heads(1, 2, 1, 16) * 3
    assert agree(q, q, v, is_causal=True) >= 3
    torch.testing.assert_close(layerzero.sync.attention(q, q, v), v)


def bounded() -> LocalDevice:
    """A device with a fast kernel up to batch 13 and length 13, and a slow one without bounds.

    13 and 14 are one point of the key's grid, so that only the bounds' own bits tell them apart.
    """
    assert grid(13) == grid(14)
    limits = ("B <= 13 else BATCH_TOO_LARGE", "Sk <= 13 else SEQ_TOO_LONG")
    return device(
        [kernel("small.attention", launch_us=0.1, limits=limits), kernel("any.attention", launch_us=90.0)]
    )


def served_by(own: LocalDevice, batch: int, length: int) -> tuple[str, list[Reason]]:
    """Which of the two kernels serves a call, and why the bounded one does not."""
    q = heads(batch, 2, length, 8)
    full = ATTENTION.build(q, q, q)[1]
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    return record.kernel, [r.reason for r in record.candidate("small.attention").rejected]


def test_the_largest_batch_is_taken_and_one_more_is_not() -> None:
    """EC-003: a bound on the batch holds to the very number, whatever the key's grid rounds."""
    own = bounded()
    assert served_by(own, 13, 8) == ("small.attention", [])
    assert served_by(own, 14, 8) == ("any.attention", [Reason.BATCH_TOO_LARGE])


def test_the_longest_sequence_is_taken_and_one_more_is_not() -> None:
    """EC-004: a bound on the length holds to the very number, whatever the key's grid rounds."""
    own = bounded()
    assert served_by(own, 2, 13) == ("small.attention", [])
    assert served_by(own, 2, 14) == ("any.attention", [Reason.SEQ_TOO_LONG])


def test_strided_operands_go_to_a_kernel_that_takes_them() -> None:
    """EC-006: a kernel that needs dense operands is refused under strict, another one serves."""
    dense = kernel("dense.rms_norm", launch_us=0.1, contiguous=True)
    own = device([dense, kernel("any.rms_norm", launch_us=90.0)], lz.Settings(strict=True))
    full = RMS.build(torch.randn(8, 6).t())[1]
    record = own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()
    assert record.kernel == "any.rms_norm"
    assert Reason.NOT_CONTIGUOUS in {r.reason for r in record.candidate("dense.rms_norm").rejected}


def test_a_last_stride_other_than_one_is_a_reason() -> None:
    """EC-007: a kernel that reads rows densely refuses every other stride, by its own reason."""
    own = device(
        [kernel("rows.rms_norm", launch_us=0.1, last_stride1=True), kernel("any.rms_norm", launch_us=90.0)],
        lz.Settings(strict=True),
    )
    full = RMS.build(torch.randn(4, 16)[:, ::2])[1]
    record = own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()
    assert record.kernel == "any.rms_norm"
    assert Reason.STRIDE_LAST_DIM in {r.reason for r in record.candidate("rows.rms_norm").rejected}


def test_a_batch_of_seven() -> None:
    """EC-009: a batch that is no power of two gives what the reference gives, in every kernel."""
    assert agree(heads(7, 2, 5, 16), heads(7, 2, 9, 16), heads(7, 2, 9, 16)) >= 3


def test_a_length_of_513() -> None:
    """EC-010: one token beyond a tile gives what the reference gives, in every kernel."""
    q = heads(1, 2, 513, 16)
    assert agree(q, q, q, is_causal=True) >= 3


def test_a_head_size_of_96() -> None:
    """EC-011: a head size that is a multiple of 32 and no power of two, in every kernel."""
    q = heads(2, 2, 8, 96)
    assert agree(q, q, q) >= 3


def test_fewer_queries_than_keys() -> None:
    """EC-012: 512 queries before 1024 keys, causal from the end, in every kernel."""
    k = heads(1, 1, 1024, 16)
    assert agree(heads(1, 1, 512, 16), k, k, is_causal=True) >= 3


def test_outputs_keep_their_dtype_whatever_the_kernel_computes_in() -> None:
    """EC-014: a float32 kernel serves float16: the output is float16, the log-sum-exp stays float32."""
    own = device([kernel("wide.attention", dtypes=frozenset({"float32"}))])
    q = heads(1, 2, 4, 8).half()
    out, lse = own.launch(ATTENTION, ATTENTION.build(q, q, q, return_lse=True)[1])
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


def test_subnormals_follow_torchs_switch() -> None:
    """EC-015: a subnormal product is itself or zero as the thread's switch says, never anything else."""
    x, weight = torch.full((1, 4), 1e-40), torch.eye(4)
    assert torch.equal(layerzero.sync.linear(x, weight, backend="reference.linear"), x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        flushed = layerzero.sync.linear(x, weight, backend="reference.linear")
    finally:
        torch.set_flush_denormal(False)
    # Compared as bits: while the switch is on, a comparison would see zero either way.
    bits = set(flushed.view(torch.int32).flatten().tolist())
    assert bits <= {0, int(x.view(torch.int32)[0, 0])}


def test_a_device_that_is_missing_is_named() -> None:
    """EC-017: asking for CUDA where there is none says so and what to write instead."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with lz.start(lz.Settings(device="cuda", warm="off"), scoped=True) as runtime:
        with pytest.raises(ValueError, match="device='cpu'"):
            runtime.device()
        assert layerzero.sync.rms_norm(torch.randn(2, 8)).shape == (2, 8)


def gpu(sm: int) -> Hardware:
    return msgspec.structs.replace(
        probe("cpu"), platform="cuda", device="cuda:0", name=f"sm {sm}", vendor="nvidia", sm=sm
    )


def test_two_gpus_of_different_generations_choose_for_themselves() -> None:
    """EC-018: the same call on an sm 70 and an sm 90 device is judged by each device's own facts."""
    q = torch.randn(1, 8, 128, 64, dtype=torch.bfloat16)
    old = lz.dry_run("attention", q, q, q, hardware=gpu(70))
    new = lz.dry_run("attention", q, q, q, hardware=gpu(90))
    reasons = {r.reason for r in old.candidate("torch.attention.sdpa_flash").rejected}
    assert reasons == {Reason.SM_TOO_OLD}
    assert new.candidate("torch.attention.sdpa_flash").eligible


def test_a_cpu_without_avx_runs_plain_kernels() -> None:
    """EC-019: kernels that need instructions the CPU lacks are refused by name, torch's own serve."""
    plain = msgspec.structs.replace(probe("cpu"), vendor="amd", isa=frozenset())
    selection = lz.dry_run("linear", torch.randn(4, 8), torch.randn(8, 8), hardware=plain)
    assert Reason.ISA_MISSING in {r.reason for r in selection.candidate("zentorch.linear.native").rejected}
    assert selection.kernel.startswith(("torch.", "reference."))


def test_a_capturing_stream_takes_capture_safe_kernels_only() -> None:
    """EC-021: under capture the faster kernel is refused, and its plan elsewhere is untouched."""
    own = device(
        [kernel("fast.rms_norm", launch_us=0.1), kernel("safe.rms_norm", launch_us=90.0, graph_safe=True)]
    )
    full = RMS.build(torch.randn(2, 8))[1]
    signature = signature_of(RMS, full)
    with rehearsal():
        captured = own.plan(RMS, signature, full, mode_bits() | CAPTURE).selection_for_request()
    assert captured.kernel == "safe.rms_norm"
    assert {r.reason for r in captured.candidate("fast.rms_norm").rejected} == {Reason.CUDA_GRAPH_UNSAFE}
    assert own.plan(RMS, signature, full, mode_bits()).kernel == "fast.rms_norm"


def test_a_scale_is_honoured_or_a_reason() -> None:
    """EC-024: every accepting kernel uses the caller's scale; one without the feature is refused."""
    q = heads(1, 2, 6, 16)
    assert agree(q, q, q, scale=0.7) >= 3
    assert not torch.allclose(layerzero.sync.attention(q, q, q, scale=0.7), layerzero.sync.attention(q, q, q))
    own = device([kernel("plain.attention", launch_us=0.1, features=frozenset()), kernel("any.attention")])
    full = ATTENTION.build(q, q, q, scale=0.7)[1]
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    assert [r.reason for r in record.candidate("plain.attention").rejected] == [Reason.SCALE_UNSUPPORTED]


def test_keys_are_values_and_cannot_collide() -> None:
    """EC-029: a key is a tuple of the deciding values; requests that differ in one never share it."""
    base = CallSpec(
        op="attention", dims={"B": 1, "Hq": 2, "D": 8, "Sk": 5}, dtypes=("float32",), layout="BHSD"
    )
    changes: list[dict[str, Any]] = [
        {"dtype": "float16"}, {"dtypes": ("float16",)}, {"layout": "BSHD"}, {"device": "cuda:1"},
        {"features": frozenset({"causal"})}, {"modes": frozenset({"grad"})}, {"contiguous": False},
        {"last_stride1": False}, {"alignment": 4}, {"dims": {"B": 1, "Hq": 4, "D": 8, "Sk": 5}},
    ]  # fmt: skip
    maker = KeyBuilder(ATTENTION, [kernel("a.attention")], ())
    keys = [maker.key(base), *(maker.key(base.replace(**change)) for change in changes)]
    assert all(isinstance(key, tuple) for key in keys)
    assert len(set(keys)) == len(keys)


def test_a_plan_outlives_its_generation_for_who_holds_it() -> None:
    """EC-031: what was found before a change still runs; the next call is decided anew."""
    own = device([kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0)])
    full = RMS.build(torch.randn(2, 8))[1]
    held = own.plan(RMS, signature_of(RMS, full), full, mode_bits())
    own.set_policy(Policy((make_rule("deny", "a.rms_norm"),)))
    torch.testing.assert_close(held.call(*full), RMS.reference(*full))
    after = own.plan(RMS, signature_of(RMS, full), full, mode_bits())
    assert (held.kernel, after.kernel) == ("a.rms_norm", "b.rms_norm")


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "python"])
def test_a_table_of_no_keys_remembers_nothing(native: bool) -> None:
    """EC-032: max_keys=0 is off, blocking, awaited and batched; below it is an error that names the field."""
    x = torch.randn(2, 8)

    async def awaited() -> None:
        await asyncio.gather(*[lz.rms_norm(x) for _ in range(4)])

    async def awaited_in_turn() -> None:
        for _ in range(6):
            await lz.rms_norm(x)

    before = FAST_PATH.module
    try:
        FAST_PATH.use(FAST_PATH.load() if native else None)
        runtime = context_runtime()
        lz.configure(max_keys=0)
        for _ in range(3):
            lz.sync.rms_norm(x)
        decided = runtime.counters.get("selections", op="rms_norm")
        assert decided == 3
        for _ in range(2):
            asyncio.run(awaited())
        assert runtime.counters.get("selections", op="rms_norm") >= decided + 2
        decided = runtime.counters.get("selections", op="rms_norm")
        asyncio.run(awaited_in_turn())
        assert runtime.counters.get("selections", op="rms_norm") >= decided + 6
        assert len(runtime.device().table(ops_table.get("rms_norm")).by_key) == 0
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        FAST_PATH.use(before)
    with pytest.raises(lz.ConfigurationError, match="max_keys needs a whole number of at least 0, got -1"):
        lz.Settings(max_keys=-1)
