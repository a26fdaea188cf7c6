"""GPU kernels written in Triton, run by its interpreter on the CPU: the contract tests in a child process.

The interpreter has to be asked for before the kernels are defined. It has no bfloat16 arithmetic worth
the name, and does not know what some of Liger's kernels use; those run on a GPU only.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests import interpreter

CONTRACT = "tests/backends/test_contract.py"
# One process for all of them, on a machine that may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
INTERPRETED = {
    "liger_kernel": ("liger.rope.triton", "liger.linear_cross_entropy.chunked"),
    "triton": (
        "triton.add_rms_norm_quantize.row", "triton.add_rms_norm_quantize.group", "triton.append_kv.codes",
        "triton.rope_append_kv.heads", "triton.rope.heads", "triton.append_kv.rows", "triton.mlp.gate",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=["float32", pytest.param("float16", marks=pytest.mark.slow)])
def contract(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """The contract tests of every interpreted kernel in one dtype, in one process."""
    wanted = " or ".join(f"[{kernel}]" for kernels in INTERPRETED.values() for kernel in kernels)
    return subprocess.run(
        [sys.executable, "-m", "pytest", CONTRACT, "-vv", "-p", "no:cacheprovider", "-k", wanted],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "LAYERZERO_TEST_DTYPES": request.param},
    )


@pytest.mark.parametrize("library", INTERPRETED)
def test_interpreted_kernels_keep_the_contract(
    library: str, contract: subprocess.CompletedProcess[str]
) -> None:
    """Numbers, inputs, gradients and repetition, in float32 and float16."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if wrong := interpreter.why_not():
        pytest.skip(wrong)
    assert contract.returncode == 0, contract.stdout[-4000:] + contract.stderr[-1000:]
    for kernel in INTERPRETED[library]:
        assert f"test_results_are_within_tolerance[{kernel}] PASSED" in contract.stdout, contract.stdout
