"""A dispatch table: decisions made ahead, bucket by bucket, in a file that people read and machines check.

A bucket is a class of calls on the key's grid. Where a table is in force, a call in one of its buckets runs
on the kernel in it, as long as that kernel is allowed, able and healthy; a call outside is
chosen at run time and says so. So is a call that another policy governs than the one the table was solved
under. A table made for other hardware, or for kernels of other limits, is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.perfdb import Environment
from layerzero.perfdb.table_file import need_table, read_table_file, write_table_file
from layerzero.selection.key import GRID_VERSION
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Rule
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import CacheCorruptionError, ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason, Rejected

FORMAT = 2
TABLE_REFUSED = "dispatch_table.refused"
BUCKET_MISS = Rejected(
    Reason.DISPATCH_TABLE_MISS, "bucket", "a bucket of the dispatch table", "none that covers the call"
)


class Bucket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One class of calls and who runs it: sizes on the grid, expected microseconds, and why this kernel."""

    op: str
    kernel: str
    expected_us: float
    cost_source: str
    why: str
    dtype: str
    dims: dict[str, int]
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    layout: str = ""
    contiguous: bool = True
    capture: bool = False

    def lookup_key(self) -> Hashable:
        """What a request in this bucket has as `lookup_key_of`."""
        return (
            self.op,
            self.dtype,
            self.dtypes,
            self.features,
            self.layout,
            self.contiguous,
            self.capture,
            tuple(sorted(self.dims.items())),
        )


def lookup_key_of(request: CallSpec) -> Hashable:
    """The bucket of a request whose sizes are on the grid."""
    return (
        request.op,
        request.dtype,
        tuple(sorted(set(request.dtypes))),
        tuple(sorted(request.features)),
        request.layout,
        request.contiguous,
        "capture" in request.modes,
        tuple(sorted(request.dims.items())),
    )


class DispatchTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buckets with what they hold for; `content` is the hash of the buckets.

    `hardware` is the machine, `policy` the policy's digest, `capabilities` that of every kernel's limits.
    """

    format: int = FORMAT
    grid: int = GRID_VERSION
    date: str
    hardware: Environment
    policy: str
    capabilities: str
    content: str
    buckets: tuple[Bucket, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all; one bucket a line.

        Raises: FileExistsError: `path` is another kind of file.
        """
        write_table_file(path, self, "buckets")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DispatchTable:
        """Read what `save` wrote.

        Raises: CacheCorruptionError: it does not decode, is of another format, or does not match its hash.
        """
        return read_table_file(path, cls, "buckets", format=FORMAT, grid=GRID_VERSION)

    def need_whole(self, path: str) -> None:
        """Raises: CacheCorruptionError, by `path`: it is of another format, or does not match its hash."""
        need_table(self, path, "buckets", format=FORMAT, grid=GRID_VERSION)


class ActiveDispatchTable:
    """The table that a device's settings name, asked on misses; `refused` says why it does not hold."""

    def __init__(self, table: DispatchTable | None, path: str, refused: str = "") -> None:
        self._policy = table.policy if table is not None else ""
        self.path = path
        self._kernels = {bucket.lookup_key(): bucket.kernel for bucket in (table.buckets if table else ())}
        self.refusal = refused

    def lookup(self, request: CallSpec, bucketed: CallSpec, policy: Policy) -> str | Rejected | None:
        """The kernel of a request's bucket, or why the table leaves the choice to run time; None refused."""
        if self.refusal:
            return None
        kernel = self._kernels.get(lookup_key_of(bucketed))
        if kernel is None:
            return BUCKET_MISS
        for rest, above in _without_upper_layers(policy):
            if any(rule.applies(request) for rule in above):
                break
            if rest.digest == self._policy:
                return kernel
        needs, got = f"the table's policy {self._policy[:12]}", policy.digest[:12]
        return Rejected(Reason.DISPATCH_TABLE_POLICY_DIFFERS, "policy", needs, got, "the table solved again")

    def problem(self, policy: Policy) -> str:
        """Why the table decides nothing under a process's policy; empty where it decides."""
        if self.refusal or any(rest.digest == self._policy for rest, _ in _without_upper_layers(policy)):
            return self.refusal
        return f"{self.path}: it was solved under another policy: solve again"


def _without_upper_layers(policy: Policy) -> Iterator[tuple[Policy, tuple[Rule, ...]]]:
    """A policy without its upper layers, ever more of them, and their rules.

    Rules that do not apply to a request have no bearing on it: it is decided as under the rest.
    """
    yield policy, ()
    for layer in sorted({rule.layer for rule in policy.rules}, reverse=True):
        below = tuple(rule for rule in policy.rules if rule.layer < layer)
        yield Policy(below), tuple(rule for rule in policy.rules if rule.layer >= layer)


def capabilities_hash(kernels: Iterable[Kernel]) -> str:
    """Equal for equal kernels with equal limits, in every process."""
    limits: list[Any] = sorted((k.id, msgspec.to_builtins(k.capability, order="sorted")) for k in kernels)
    return hashlib.sha256(msgspec.json.encode(limits, order="sorted")).hexdigest()


def activate(
    path: str | os.PathLike[str], hardware: Hardware, kernels: Iterable[Kernel], *, strict: bool
) -> ActiveDispatchTable:
    """The table of a file, if it holds for this device; else refused, with a logged reason.

    Raises: ConfigurationError: it does not hold, and `strict` is set.
    """
    try:
        table = DispatchTable.load(path)
        differences = table.hardware.differences(Environment.of_hardware(hardware))
        if differences:
            raise ConfigurationError(f"{path}: it was solved for another machine: {'; '.join(differences)}")
        if table.capabilities != capabilities_hash(kernels):
            raise ConfigurationError(f"{path}: kernels or their limits have changed since: solve again")
    except (CacheCorruptionError, ConfigurationError) as error:
        if strict:
            raise ConfigurationError(str(error), path=str(path)) from error
        log.error(TABLE_REFUSED, path=str(path), why=str(error))
        return ActiveDispatchTable(None, str(path), str(error))
    return ActiveDispatchTable(table, str(path))
