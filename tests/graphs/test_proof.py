"""Proofs persist for each kernel and environment, and decide what judge says under capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerzero.graphs.proof import Proofs, ProofStore
from layerzero.graphs.rehearsal import rehearsal
from layerzero.graphs.verdict import CaptureFinding, CaptureProblem
from layerzero.ops import table as ops_table
from layerzero.selection.modes import CAPTURE, REHEARSAL, mode_bits
from layerzero.selection.plan import signature_of
from layerzero.spec.errors import CudaGraphUnsafeError
from layerzero.spec.hardware import probe
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

CPU = probe("cpu")
RMS = ops_table.get("rms_norm")
BAD = (CaptureFinding(CaptureProblem.SYNCHRONISED, "RuntimeError: called a synchronizing operation"),)
FAST, SAFE = kernel("fast.rms_norm", launch_us=0.1), kernel("safe.rms_norm", launch_us=90.0, graph_safe=True)


def call() -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Signature and arguments of a norm."""
    full = RMS.build(torch.randn(2, 8))[1]
    return signature_of(RMS, full), full


def test_one_unsafe_case_makes_a_kernel_unsafe_until_it_is_safe_again() -> None:
    """Cases add up; trying one again replaces what it showed."""
    proofs = Proofs(CPU)
    assert proofs.proof_of(FAST) is None
    assert proofs.add(FAST, "small", ()).safe
    unsafe = proofs.add(FAST, "large", BAD)
    assert not unsafe.safe and "large: synchronised" in str(unsafe) and "small" not in str(unsafe)
    assert proofs.add(FAST, "large", ()).safe


def test_proofs_are_found_by_later_processes(tmp_path: Path) -> None:
    """Another reader of the folder knows what was proved; another environment knows nothing."""
    before = Proofs(CPU, ProofStore(tmp_path)).add(FAST, "case", BAD)
    after = Proofs(CPU, ProofStore(tmp_path))
    assert after.proof_of(FAST) == before
    other = Proofs(type(CPU)(platform="cpu", device="cpu", name="another", vendor="x"), ProofStore(tmp_path))
    assert other.proof_of(FAST) is None


def test_another_version_of_the_kernels_library_needs_another_proof(tmp_path: Path) -> None:
    """What a proof holds for includes the distributions that the kernel needs."""
    import dataclasses

    proofs = Proofs(CPU, ProofStore(tmp_path))
    proofs.add(FAST, "case", ())
    assert proofs.proof_of(dataclasses.replace(FAST, distributions=("msgspec>=0.19",))) is None


def test_a_damaged_proof_is_set_aside_and_counts_as_unsafe(tmp_path: Path) -> None:
    """What cannot be read never lets a kernel into a capture, in this process and the next."""
    Proofs(CPU, ProofStore(tmp_path)).add(SAFE, "case", ())
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(b'"case"', b'"cast"'))
    for _ in range(2):
        proofs = Proofs(CPU, ProofStore(tmp_path))
        (applied,) = proofs.apply((SAFE,), strict=False)
        assert not applied.capability.graph_safe
    assert [p.name for p in tmp_path.iterdir() if "damaged-1" in p.name]
    assert Proofs(CPU, ProofStore(tmp_path)).add(SAFE, "case", ()).safe


@pytest.mark.parametrize("strict", [False, True])
def test_a_proof_wins_over_what_a_kernel_declares(strict: bool) -> None:
    """Unknown kernels and, when strict, declared ones are refused; a proof decides either way."""
    proofs = Proofs(CPU)
    fast, safe = (k.capability.graph_safe for k in proofs.apply((FAST, SAFE), strict=strict))
    assert (fast, safe) == (False, not strict)
    proofs.add(FAST, "case", ())
    proofs.add(SAFE, "case", BAD)
    again = [proofs.apply((FAST, SAFE), strict=strict) for _ in range(2)]
    assert [k.capability.graph_safe for k in again[0]] == [True, False]
    assert again[0][0] is again[1][0], "one object each, or tables would be dropped at every refresh"


def test_a_proof_changes_what_a_capture_gets() -> None:
    """Judge refuses the unproved kernel under capture, and takes it once it was proved."""
    own = device([FAST, SAFE])
    signature, full = call()
    with rehearsal():
        refused = own.plan(RMS, signature, full, mode_bits() | CAPTURE).selection_for_request()
    assert refused.kernel == "safe.rms_norm"
    assert {r.reason for r in refused.candidate("fast.rms_norm").rejected} == {Reason.CUDA_GRAPH_UNSAFE}
    own.proofs.add(FAST, "case", ())
    own.refresh()
    with rehearsal():
        assert own.plan(RMS, signature, full, mode_bits() | CAPTURE).kernel == "fast.rms_norm"


def test_strict_mode_takes_nothing_that_was_only_declared() -> None:
    """`graph_strict` leaves no kernel, which is named as what it is."""
    own = device([FAST, SAFE], Settings(graph_strict=True))
    signature, full = call()
    with rehearsal(), pytest.raises(CudaGraphUnsafeError, match="no kernel that is safe") as caught:
        own.plan(RMS, signature, full, mode_bits() | CAPTURE)
    assert {c.kernel for c in caught.value.context["trace"]} == {"fast.rms_norm", "safe.rms_norm"}
    assert own.plan(RMS, signature, full, mode_bits()).kernel == "fast.rms_norm"


def test_nothing_is_chosen_during_a_capture() -> None:
    """A call that was not rehearsed is an error; one that was gets the plan it rehearsed."""
    own = device([FAST, SAFE])
    signature, full = call()
    with pytest.raises(CudaGraphUnsafeError, match="rehearse_capture"):
        own.plan(RMS, signature, full, mode_bits() | CAPTURE)
    with rehearsal():
        planned = own.plan(RMS, signature, full, mode_bits() | CAPTURE)
    assert not REHEARSAL.on
    assert own.plan(RMS, signature, full, mode_bits() | CAPTURE) is planned
    computed = own.table(RMS).computed
    strided = RMS.build(torch.randn(2, 8).as_strided((2, 8), (8, 1)))[1]
    assert own.plan(RMS, signature_of(RMS, strided), strided, mode_bits() | CAPTURE).kernel == planned.kernel
    assert own.table(RMS).computed == computed


def test_a_kernel_that_fails_in_a_capture_is_not_replaced() -> None:
    """Another kernel would be recorded behind half of the first: the error says so."""

    def broken(*args: object) -> object:
        raise RuntimeError("launch failed")

    own = device([kernel("broken.rms_norm", broken, launch_us=0.1, graph_safe=True), SAFE])
    signature, full = call()
    with rehearsal():
        plan = own.plan(RMS, signature, full, mode_bits() | CAPTURE)
    with pytest.raises(CudaGraphUnsafeError, match=r"broken\.rms_norm raised RuntimeError: launch failed"):
        own.recover(plan, full, RuntimeError("launch failed"))
    assert (
        own.recover(own.plan(RMS, signature, full, mode_bits()), full, RuntimeError())[1].kernel
        == "safe.rms_norm"
    )
