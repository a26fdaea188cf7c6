"""A dispatch table: decisions made ahead, range by range, in a file that people read and machines check.

A bucket is a class of calls: all sizes within its ranges, which are those of one leaf of a decision tree. A
table that was written in an older format is read as the newest one; one that was made for other hardware, or
for kernels of other limits, is refused where it is put in force (`selection/active_table.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import msgspec

from layerzero.ops import table as ops_table
from layerzero.perfdb import Environment
from layerzero.perfdb.table_file import Plain, decode_table, read_table_file, write_table_file
from layerzero.selection.key import GRID_VERSION
from layerzero.selection.solver.families import Family, grid_below
from layerzero.spec.kernel import Kernel

FORMAT = 3
EVERY_OP = "*"


class Bucket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Calls of one family whose sizes are within `ranges` (both ends included), and who runs them.

    A call that needs `ideal` microseconds by the roofline alone is expected to take
    sqrt(`floor_us`^2 + (`multiple` * `ideal`)^2), about `expected_us` over the range. `costs` are what every
    kernel that takes the whole range was expected to cost there, before any rule of a policy.
    """

    op: str
    kernel: str
    expected_us: float
    cost_source: str
    why: str
    dtype: str
    ranges: dict[str, tuple[int, int]]
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    layout: str = ""
    contiguous: bool = True
    capture: bool = False
    floor_us: float = 0.0
    multiple: float = 0.0
    costs: dict[str, float] = {}

    @property
    def family(self) -> Family:
        """What its calls have in common beside their sizes."""
        shared = {name: getattr(self, name) for name in Family.__struct_fields__ if name != "axes"}
        return Family(axes=tuple(sorted(self.ranges)), **shared)


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well the decisions of an op hold where they were not made from.

    `loss` is the mean share by which the decided kernel is slower than the best one, over `calls` measured
    calls that the decision did not know; `fixed_loss` that of the one kernel that is best over all of them,
    None where none takes them all.
    """

    calls: int
    loss: float
    fixed_loss: float | None


class DispatchTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buckets with what they hold for; `content` is the hash of the buckets.

    `hardware` is the machine, `policy` the policy's digest, `limits` by op that of its kernels' limits (of
    all kernels, by "*", in tables of older formats), `held_out` by op how good the decisions are.
    """

    format: int = FORMAT
    grid: int = GRID_VERSION
    date: str
    hardware: Environment
    policy: str
    limits: dict[str, str]
    content: str
    held_out: dict[str, HeldOutResult] = {}
    buckets: tuple[Bucket, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all; one bucket a line.

        Raises: FileExistsError: `path` is another kind of file.
        """
        write_table_file(path, self, "buckets")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DispatchTable:
        """Read what `save` wrote, in this or an older format.

        Raises: CacheCorruptionError: it does not decode, is of another format, or does not match its hash.
        """
        return read_table_file(path, cls, "buckets", MIGRATIONS, format=FORMAT, grid=GRID_VERSION)

    @classmethod
    def decode(cls, data: bytes, path: str) -> DispatchTable:
        """The table in the bytes of a file, as `load` reads it; `path` names it.

        Raises: CacheCorruptionError.
        """
        return decode_table(data, path, cls, "buckets", MIGRATIONS, format=FORMAT, grid=GRID_VERSION)


def _renamed(table: Plain) -> Plain:
    """Format 1 said `made` for the date and `source` for where a cost comes from."""
    table["date"] = table.pop("made")
    for bucket in table["buckets"]:
        bucket["cost_source"] = bucket.pop("source")
    return table


def _ranged(table: Plain) -> Plain:
    """Format 2 named one point of the grid, which stands for all sizes above the point before it."""
    table["limits"] = {EVERY_OP: table.pop("capabilities")}
    for bucket in table["buckets"]:
        op = bucket["op"]
        exact = ops_table.get(op).exact_dims if op in ops_table.FILES else frozenset()
        bucket["ranges"] = {
            axis: (size if axis in exact or not size else grid_below(size) + 1, size)
            for axis, size in bucket.pop("dims").items()
        }
        bucket["floor_us"] = bucket["expected_us"]
        bucket["costs"] = {bucket["kernel"]: bucket["expected_us"]}
    return table


MIGRATIONS = {1: _renamed, 2: _ranged}


def limits_of(op: str, kernels: Iterable[Kernel], platform: str) -> str:
    """The digest of what the kernels of an op for one platform take: what a decision about it rests on."""
    return capabilities_hash(k for k in kernels if k.op == op and platform in k.capability.platforms)


def capabilities_hash(kernels: Iterable[Kernel]) -> str:
    """Equal for equal kernels with equal limits, in every process."""
    limits: list[Any] = sorted((k.id, msgspec.to_builtins(k.capability, order="sorted")) for k in kernels)
    return hashlib.sha256(msgspec.json.encode(limits, order="sorted")).hexdigest()
