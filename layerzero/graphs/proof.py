"""What is known of each kernel's safety under capture, kept for each environment, in memory and in files.

A kernel is safe where every case that was tried on it was; one unsafe case makes it unsafe. A proof holds
for the kernel, the device's model and the software under it; any change of those asks for another proof.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from layerzero._util.record_store import RecordStore
from layerzero._util.version import installed_version
from layerzero.graphs.verdict import CaptureFinding, CaptureProblem
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

ANY = "*"

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


class CaptureProof(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about one kernel in one environment: the findings of each case, none where it was safe.

    `cases` maps a call in words (sizes, dtype, features) to its findings; `at` is wall-clock time.
    """

    kernel: str
    environment: str
    cases: Mapping[str, tuple[CaptureFinding, ...]] = {}
    timestamp: float = 0.0

    @property
    def safe(self) -> bool:
        """Whether some case was tried and none showed a problem."""
        return bool(self.cases) and not any(self.cases.values())

    def __str__(self) -> str:
        if self.safe:
            return f"{self.kernel}: safe in {len(self.cases)} cases"
        shown = "; ".join(
            f"{case}: {', '.join(map(str, findings))}" for case, findings in self.cases.items() if findings
        )
        return f"{self.kernel}: unsafe in {shown}" if shown else f"{self.kernel}: not tried"


def environment_of(kernel: Kernel, hardware: Hardware) -> str:
    """What a proof holds for: the device's model, torch, CUDA, the driver, the kernel's own libraries."""
    parts = [hardware.name, hardware.torch, hardware.cuda, hardware.driver]
    for requirement in kernel.distributions:
        name = _NAME.match(requirement)
        if name is not None:
            parts.append(f"{name[0]} {installed_version(name[0]) or 'missing'}")
    return " / ".join(part for part in parts if part)


class ProofStore(RecordStore[CaptureProof]):
    """Proofs as files, one for each kernel and environment.

    A kernel whose file is damaged counts as unsafe until it is proved again.
    """

    kind = CaptureProof
    name = "graph_proof"
    max_bytes = 4 << 20

    @classmethod
    def within(cls, state_dir: str | None) -> ProofStore | None:
        """The store of a folder of state; None without one."""
        return cls(Path(state_dir) / "graphs") if state_dir is not None else None

    def key(self, record: CaptureProof) -> tuple[str, str]:
        """One record for each kernel and environment."""
        return record.kernel, record.environment

    def lost(self, kernel: str, why: str) -> CaptureProof:
        """The kernel is unsafe in every environment."""
        findings = (CaptureFinding(CaptureProblem.NOT_SHOWN, why),)
        return CaptureProof(kernel=kernel, environment=ANY, cases={"any": findings})


class Proofs:
    """What one device knows; `rejections` reads it through the capabilities that `apply` returns.

    Without a proof a kernel keeps what it declares, or nothing where `strict` asks for proofs alone.
    """

    def __init__(
        self, hardware: Hardware, store: ProofStore | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self._hardware = hardware
        self._store = store
        self._wall = wall
        self._lock = threading.Lock()
        self._proofs = {(p.kernel, p.environment): p for p in (store.load() if store is not None else ())}
        self._judged: dict[tuple[Kernel, bool], Kernel] = {}

    def copy_to(self, store: ProofStore | None) -> None:
        """Write what this process knows to another store.

        Raises: OSError: it cannot be read or written.
        """
        if store is not None:
            store.load()
            for proof in self._proofs.values():
                store.save(proof)

    def adopt(self, store: ProofStore | None) -> None:
        """Keep proofs there from now on; what is there counts where this process knows nothing."""
        stored = {(p.kernel, p.environment): p for p in (store.load() if store is not None else ())}
        with self._lock:
            self._proofs = {**stored, **self._proofs}
            self._store = store

    def proof_of(self, kernel: Kernel) -> CaptureProof | None:
        """The proof for a kernel as it is installed now, or None."""
        proof = self._proofs.get((kernel.id, environment_of(kernel, self._hardware)))
        return proof if proof is not None else self._proofs.get((kernel.id, ANY))

    def add(self, kernel: Kernel, case: str, findings: tuple[CaptureFinding, ...]) -> CaptureProof:
        """Record one case; a case tried again replaces what it showed before.

        Raises: OSError: the store cannot be written; this process knows it anyway.
        """
        environment = environment_of(kernel, self._hardware)
        with self._lock:
            before = self._proofs.get((kernel.id, environment))
            cases = {**(before.cases if before is not None else {}), case: findings}
            proof = CaptureProof(
                kernel=kernel.id, environment=environment, cases=cases, timestamp=self._wall()
            )
            self._proofs = {**self._proofs, (kernel.id, environment): proof}
        if self._store is not None:
            self._store.save(proof)
        return proof

    def all(self) -> tuple[CaptureProof, ...]:
        """Every proof that is known, by kernel."""
        return tuple(self._proofs[key] for key in sorted(self._proofs))

    def take(self, proof: CaptureProof) -> bool:
        """Know what another machine like this one found, too; whether that was new.

        What this machine found itself counts where both tried a case.
        Raises: OSError: the store cannot be written; this process knows it anyway.
        """
        key = proof.kernel, proof.environment
        with self._lock:
            local_proof = self._proofs.get(key)
            local_cases = local_proof.cases if local_proof is not None else {}
            if proof.cases.keys() <= local_cases.keys():
                return False
            proof = msgspec.structs.replace(proof, cases={**proof.cases, **local_cases})
            self._proofs = {**self._proofs, key: proof}
        if self._store is not None:
            self._store.save(proof)
        return True

    def apply(self, kernels: Iterable[Kernel], *, strict: bool) -> tuple[Kernel, ...]:
        """The kernels with `graph_safe` as it is known here; one object each, however often it is asked."""
        return tuple(self._apply(kernel, strict) for kernel in kernels)

    def _apply(self, kernel: Kernel, strict: bool) -> Kernel:
        declared = kernel.capability.graph_safe
        if "graph_safe" in kernel.capability.narrowed:
            return kernel  # a deployment took it out of captures: no proof brings it back
        proof = self.proof_of(kernel) if self._proofs else None
        safe = proof.safe if proof is not None else declared and not strict
        if safe == declared:
            return kernel
        judged = self._judged.get((kernel, safe))
        if judged is None:
            capability = msgspec.structs.replace(kernel.capability, graph_safe=safe)
            new = dataclasses.replace(kernel, capability=capability)
            judged = self._judged.setdefault((kernel, safe), new)
        return judged
