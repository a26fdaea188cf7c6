"""Which calls measurements do not cover: those without a row, and those that a later kernel takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from layerzero.perfdb.record import Measurement, Site, plausible

Asked = tuple[Site, Collection[str]]  # where a call's measurement stands, and the kernels that take the call


def uncovered(calls: Sequence[Asked], rows: Iterable[Measurement]) -> list[bool]:
    """For each call whether it is to be measured: no row counts, or a kernel that takes it came later.

    A kernel without a time at a site came later where its first time of the op is newer than all the site's:
    one that was there already was refused, and would be again. A kernel that has no time of the op at all
    makes one call miss, so that one that fails everywhere does not have everything measured again.
    """
    there: dict[Site, set[str]] = {}
    latest: dict[Site, int] = {}
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        if plausible(row):
            continue  # it does not count, so the call is measured again
        # A kernel that casts has its row under the type that it computes in.
        site = msgspec.structs.replace(row.site, dtype="")
        there.setdefault(site, set()).add(row.kernel)
        latest[site] = max(latest.get(site, 0), row.at)
        known = (row.site.op, row.kernel)
        first[known] = min(first.get(known, math.inf), row.at)
    probed: set[tuple[str, str]] = set()
    found = []
    for asked, takes in calls:
        site = msgspec.structs.replace(asked, dtype="")
        new = {(asked.op, k) for k in takes if site in there and k not in there[site]}
        never = {k for k in new if k not in first} - probed
        probed |= never
        later = any(first[k] > latest[site] for k in new if k in first)
        found.append(site not in there or later or bool(never))
    return found
