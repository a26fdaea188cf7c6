"""What is known of each kernel's safety under capture, kept for each environment, in memory and in files.

A kernel is safe where every case that was tried on it was; one unsafe case makes it unsafe. A proof holds
for the kernel, the device's model and the software under it; any change of those asks for another proof.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from layerzero._util import files, log
from layerzero.graphs.verdict import CaptureFinding, CaptureProblem
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

SCHEMA = 1
MAX_BYTES = 4 << 20
ANY = "*"
PROOF_SET_ASIDE = "graph_proof.set_aside"
PROOF_NEWER = "graph_proof.newer_found"

_FILE = re.compile(r"[a-z0-9_.]{1,192}@[0-9a-f]{16}\.json")
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
            parts.append(f"{name[0]} {_version(name[0])}")
    return " / ".join(part for part in parts if part)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    proof: CaptureProof
    checksum: str


class _Header(msgspec.Struct, frozen=True):
    schema: int


class ProofStore:
    """Proofs as files of `directory`, one for each kernel and environment, written whole or not at all."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @classmethod
    def within(cls, state_dir: str | None) -> ProofStore | None:
        """The store of a folder of state; None without one."""
        return cls(Path(state_dir) / "graphs") if state_dir is not None else None

    def load(self) -> tuple[CaptureProof, ...]:
        """Every proof; a damaged file is set aside and its kernel counts as unsafe until it is proved again.

        Raises: OSError: the directory exists and cannot be read. PermissionError: others can write it.
        """
        if not self.directory.is_dir():
            return ()
        files.own_folder(self.directory)
        proofs = (self._read(path) for path in sorted(self.directory.iterdir()) if _FILE.fullmatch(path.name))
        return tuple(proof for proof in proofs if proof is not None)

    def save(self, proof: CaptureProof) -> None:
        """Write `proof` in place of an earlier one of its kernel and environment.

        Raises: OSError: the file cannot be written.
        """
        files.write_whole(self._path(proof), msgspec.json.encode(_Stored(SCHEMA, proof, _checksum(proof))))

    def _path(self, proof: CaptureProof) -> Path:
        digest = hashlib.sha256(proof.environment.encode()).hexdigest()[:16]
        return self.directory / f"{proof.kernel}@{digest}.json"

    def _read(self, path: Path) -> CaptureProof | None:
        try:
            data = files.read_bounded(path, MAX_BYTES)
            schema = files.decode_json(data, _Header).schema
            if schema > SCHEMA:
                log.warning(PROOF_NEWER, path=str(path), schema=schema, needs=SCHEMA)
                return None
            stored = files.decode_json(data, _Stored)
            if stored.checksum != _checksum(stored.proof) or self._path(stored.proof) != path:
                raise ValueError("checksum or name does not fit the proof")
        except FileNotFoundError:
            return None  # another process has just set it aside
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            aside = files.set_aside(path)
            log.error(PROOF_SET_ASIDE, path=str(path), moved_to=str(aside), why=str(error))
            findings = (
                CaptureFinding(
                    CaptureProblem.NOT_SHOWN, f"its record was unreadable and is now {aside.name}"
                ),
            )
            lost = CaptureProof(kernel=path.name.partition("@")[0], environment=ANY, cases={"any": findings})
            self.save(lost)
            return lost
        return stored.proof


def _checksum(proof: CaptureProof) -> str:
    return hashlib.sha256(msgspec.json.encode(proof)).hexdigest()[:32]


class Proofs:
    """What one device knows; `rejections` reads it through the capabilities that `applied` gives.

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
            judged = self._judged.setdefault(
                (kernel, safe), dataclasses.replace(kernel, capability=capability)
            )
        return judged
