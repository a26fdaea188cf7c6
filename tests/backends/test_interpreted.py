"""GPU kernels written in Triton, run by its interpreter on the CPU: the contract tests in a child process.

The interpreter has to be asked for before the kernels are defined. It has no bfloat16 arithmetic worth
the name, and does not know what some of Liger's kernels use; those run on a GPU only.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import children, interpreter

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


# What reads ids and has no float32.
IDS = (
    "triton.paged_attention.decode", "triton.paged_attention.rows", "triton.paged_attention.decode_codes",
    "triton.mla_attention.numbers", "triton.mla_attention.numbers_in_order", "triton.ragged_attention.codes",
)  # fmt: skip


@pytest.fixture(scope="module", params=["float32", pytest.param("float16", marks=pytest.mark.slow)])
def contract(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CompletedProcess[str]:
    """The contract tests of every interpreted kernel in one dtype, in one process."""
    wanted = " or ".join(f"[{kernel}]" for kernels in INTERPRETED.values() for kernel in kernels)
    return contract_run(wanted, request.param, tmp_path_factory.mktemp("contract"))


def contract_run(wanted: str, dtype: str, folder: Path) -> CompletedProcess[str]:
    """The wanted contract tests in one dtype, in a process of their own."""
    words = [CONTRACT, "-vv", "-p", "no:cacheprovider", "-k", wanted]
    return children.run(
        "from tests import interpreter; interpreter.remember(); "
        f"import pytest; raise SystemExit(pytest.main({words}))",
        folder=folder,
        variables=os.environ | {"TRITON_INTERPRET": "1", "LAYERZERO_TEST_DTYPES": dtype},
        timeout=800.0,
    )


@pytest.mark.parametrize("library", INTERPRETED)
def test_interpreted_kernels_keep_the_contract(library: str, contract: CompletedProcess[str]) -> None:
    """Numbers, inputs, gradients and repetition, in float32 and float16."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if wrong := interpreter.why_not():
        pytest.skip(wrong)
    assert contract.returncode == 0, contract.stdout[-4000:] + contract.stderr[-1000:]
    for kernel in INTERPRETED[library]:
        assert f"test_results_are_within_tolerance[{kernel}] PASSED" in contract.stdout, contract.stdout


def test_kernels_of_16_bits_read_ids_that_lie_apart(tmp_path: Path) -> None:
    """Tables, lengths and offsets of sequences, in float16."""
    if wrong := interpreter.why_not():
        pytest.skip(wrong)
    wanted = "test_ids_may_be_strided and (" + " or ".join(f"[{kernel}]" for kernel in IDS) + ")"
    ended = contract_run(wanted, "float16", tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    for kernel in IDS:
        assert f"test_ids_may_be_strided[{kernel}] PASSED" in ended.stdout, ended.stdout
