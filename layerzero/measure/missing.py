"""Which calls measurements do not cover: those without a row, and those that a later kernel takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from layerzero.perfdb.record import BenchmarkCase, Measurement, implausible_reason

CallToCover = tuple[
    BenchmarkCase, Collection[str]
]  # where a call's measurement is stored, and the kernels that take the call


def find_uncovered(calls: Sequence[CallToCover], rows: Iterable[Measurement]) -> list[bool]:
    """For each call whether it is to be measured: no row counts, or a kernel that takes it came later.

    A kernel without a time of a case came later where its first time of the op is newer than all of the
    case's: one that was there already was refused, and would be again. A kernel that has no time of the op at
    all makes one call miss, so that one that fails everywhere does not have everything measured again.
    """
    kernels_by_case: dict[BenchmarkCase, set[str]] = {}
    latest: dict[BenchmarkCase, int] = {}
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        if implausible_reason(row):
            continue  # it does not count, so the call is measured again
        # A kernel that casts has its row under the type that it computes in.
        case = msgspec.structs.replace(row.case, dtype="")
        kernels_by_case.setdefault(case, set()).add(row.kernel)
        latest[case] = max(latest.get(case, 0), row.timestamp)
        op_kernel = (row.case.op, row.kernel)
        first[op_kernel] = min(first.get(op_kernel, math.inf), row.timestamp)
    probed: set[tuple[str, str]] = set()
    missing = []
    for call_case, eligible in calls:
        case = msgspec.structs.replace(call_case, dtype="")
        untimed = {
            (call_case.op, k) for k in eligible if case in kernels_by_case and k not in kernels_by_case[case]
        }
        never_timed = {k for k in untimed if k not in first} - probed
        probed |= never_timed
        added_later = any(first[k] > latest[case] for k in untimed if k in first)
        missing.append(case not in kernels_by_case or added_later or bool(never_timed))
    return missing
