"""Failures of kernels, libraries and callers, one test for each scenario of the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason
from tests.kernels import device, kernel
from tests.waiting import LIMIT_S

RMS = ops_table.get("rms_norm")


def full() -> Any:
    return RMS.build(torch.randn(3, 8))[1]


def exhausted(*_: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory: planted")


def test_out_of_memory_goes_to_the_next_kernel() -> None:
    """FS-005: a kernel that runs out of memory is replaced inside the call, and the record says why."""
    own = device([kernel("big.rms_norm", exhausted, launch_us=0.1), kernel("small.rms_norm", launch_us=9.0)])
    args = full()
    result, plan = own.launch_planned(RMS, args)
    torch.testing.assert_close(result, RMS.reference(*args))
    record = plan.selection_for_request()
    assert (record.kernel, record.fallback) == ("small.rms_norm", "big.rms_norm")
    assert "out of memory" in record.why
    assert own.counters.get("out_of_memory", kernel="big.rms_norm") == 1
    assert own.health.statuses() == (), "memory is no fault of a kernel's"


def test_memory_that_nobody_finds_is_one_clear_error() -> None:
    """FS-011: when every kernel fails to allocate, one error chains it and no circuit counts it."""
    own = device([kernel("a.rms_norm", exhausted), kernel("b.rms_norm", exhausted)])
    with pytest.raises(lz.KernelExecutionError) as caught:
        own.launch(RMS, full())
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert not own.health.blocked_kernels()


def test_a_compiler_that_fails_costs_one_kernel() -> None:
    """FS-017: a kernel that does not build is refused in the compiler's words, and tried once."""
    tries: list[int] = []

    def build() -> Any:
        tries.append(1)
        raise RuntimeError("ptxas exits with 1: planted")

    own = device(
        [kernel("jit.rms_norm", load=build, launch_us=0.1, cold=True), kernel("any.rms_norm", launch_us=9.0)]
    )
    own.warm(["jit.rms_norm"])
    calls = [full() for _ in range(3)]
    record = [
        own.plan(RMS, signature_of(RMS, args), args, mode_bits()).selection_for_request() for args in calls
    ][-1]
    assert record.kernel == "any.rms_norm"
    refused = record.candidate("jit.rms_norm").rejected
    assert refused[0].reason is Reason.KERNEL_LOAD_FAILED
    assert "ptxas" in refused[0].got
    assert len(tries) == 1


@pytest.mark.parametrize(
    "name", ["", "a", "A.rms_norm", "a rms.norm", "a/b.rms_norm", "../x.rms_norm", "a.b\n", "é.rms"]
)
def test_a_kernel_id_has_an_alphabet(name: str) -> None:
    """FS-029: an id that could be a path, a label or two lines is refused when the kernel is made."""
    with pytest.raises(ValueError, match="kernel id"):
        Kernel(
            id=name,
            op="rms_norm",
            backend=name.split(".")[0],
            capability=Capability(source="a test"),
            load=lambda: RMS.reference,
            efficiency=Efficiency(0.5, 0.5, 1.0, "a test"),
        )


def test_negative_sizes_are_values_that_are_wrong() -> None:
    """FS-031: a size below zero is a ValueError that names the argument."""
    with pytest.raises(ValueError, match="q_len"):
        layerzero.sync.alibi(torch.ones(2), -1, 4)
    with pytest.raises(ValueError, match="top_k"):
        layerzero.sync.sample(torch.randn(2, 8), top_k=-1)


def test_text_for_a_number_is_a_type_that_is_wrong() -> None:
    """FS-032: a word where a number belongs is a TypeError that names the argument."""
    with pytest.raises(TypeError, match="q_len"):
        layerzero.sync.alibi(torch.ones(2), "4", 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="top_k"):
        layerzero.sync.sample(torch.randn(2, 8), top_k="5")  # type: ignore[arg-type]


BLOCKED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        out = {"triton", "flash_attn", "flashinfer", "liger_kernel", "xformers", "zentorch", "ray"}
        if name.split(".")[0] in out:
            raise ImportError(f"{name} is out of reach here")

sys.meta_path.insert(0, Refuse())
import torch
import layerzero as lz

assert not torch.cuda.is_available()
x, w = torch.randn(4, 64), torch.randn(64, 64)
q = torch.randn(1, 4, 8, 16)
lz.sync.attention(q, q, q, is_causal=True)
lz.sync.rms_norm(x)
lz.sync.add_rms_norm(x, x)
lz.sync.layer_norm(x)
lz.sync.linear(x, w)
lz.sync.mlp(x, torch.randn(16, 64), torch.randn(64, 8))
lz.sync.embedding(torch.tensor([0, 3]), w)
lz.sync.cross_entropy(x, torch.tensor([0, 1, 2, 3]))
lz.sync.sample(x, seed=1)
lz.sync.sample_topk(x, 4, seed=1)
lz.sync.sample_topp(x, 0.5, seed=1)
lz.sync.alibi(torch.ones(2), 3, 4)
cos, sin = lz.rope_tables(16, 32)
lz.sync.rope(q.transpose(1, 2), q.transpose(1, 2), torch.arange(8).expand(1, 8), cos, sin)

from layerzero.ops import table
from layerzero.runtime import current
from tests.backends.calls import Case, call

for name in table.names():
    asks = ("act_swiglu",) if name == "mlp" else ()
    out, plan = current().device("cpu").launch_planned(table.get(name), call(Case(name, asks), torch.float32))
    print(name, plan.kernel)
assert not torch.cuda.is_initialized()
"""


def test_without_a_gpu_every_op_runs_on_the_cpu() -> None:
    """FS-034 and E6.7: no CUDA, no vendor library in reach: every op runs, and nothing touches a GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", BLOCKED],
        env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ran = dict(line.split() for line in done.stdout.splitlines())
    assert set(ran) == set(ops_table.names())
    assert {kernel.split(".")[0] for kernel in ran.values()} <= {"torch", "reference", "native", "onednn"}, (
        ran
    )
