"""The dispatch table in force on a device: asked before anything is judged, and below the policy always.

It decides a call where the policy that governs the call is the one that the table was solved under, or where
what differs has no bearing on it. Under another policy of the process the table is solved again from the
costs that it holds (`solved_again`), in the background; until then, and in blocks with a policy of their own,
calls are decided at run time and say so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from layerzero._util import log
from layerzero.perfdb import Environment
from layerzero.selection.context import SelectionOptions
from layerzero.selection.decide import pick
from layerzero.selection.dispatch_table import EVERY_OP, Bucket, DispatchTable, capabilities_hash, limits_of
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Rule
from layerzero.selection.record import Accepted, Candidate
from layerzero.selection.solver.families import Family, family_of
from layerzero.selection.solver.ranges import Entry, Lookup, compile_lookup
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import CacheCorruptionError, ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason, Rejected

TABLE_REFUSED = "dispatch_table.refused"
SOLVED_AGAIN = "dispatch_table.solved_again"
BUCKET_MISS = Rejected(
    Reason.DISPATCH_TABLE_MISS, "bucket", "a bucket of the dispatch table", "none that covers the call"
)
_MAX_REMEMBERED = 4096
_NOTHING: Lookup[Bucket] = lambda sizes: None  # noqa: E731
_FAMILY_FACTS = attrgetter("op", "dtype", "dtypes", "features", "layout", "contiguous")


class ActiveDispatchTable:
    """A table that holds for this device, or why it does not (`refusal`).

    `differs(op)` says what of the op's kernels is not as it was when the table was solved: such an op is not
    decided by it. `original` is the file's own where this one was solved again under another policy, which
    decides the ops of `left`, too; `identity` is equal for tables that decide alike.
    """

    def __init__(
        self,
        table: DispatchTable | None,
        path: str,
        refusal: str = "",
        *,
        differs: Callable[[str], str] = lambda op: "",
        original: ActiveDispatchTable | None = None,
        left_ops: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self.refusal = refusal
        self.table = table
        self.original = original or self
        self._left = left_ops
        self._differs = differs
        self.identity: Hashable = (table.content, table.policy) if table is not None else refusal
        self._policy = table.policy if table is not None else ""
        self._buckets: dict[Family, list[Bucket]] = {}
        for bucket in table.buckets if table is not None else ():
            self._buckets.setdefault(bucket.family, []).append(bucket)
        self._ops = frozenset(family.op for family in self._buckets)
        self._trees: dict[Hashable, Lookup[Bucket]] = {}
        self._upper_rules: dict[str, tuple[Rule, ...] | None] = {}

    @property
    def solved_again(self) -> bool:
        """Whether its decisions are the file's, made again under another policy."""
        return self.original is not self

    def lookup(self, request: CallSpec, policy: Policy) -> Bucket | Rejected | None:
        """The bucket of a request, or why the table leaves the choice to run time; None where it is refused.

        `policy` governs the request.
        """
        if self.refusal:
            return None
        if request.op in self._left:
            return self.original.lookup(request, policy)
        # What the family follows from, as the request has it: nothing is sorted for the answer.
        place = (*_FAMILY_FACTS(request), "capture" in request.modes)
        tree = self._trees.get(place)
        if tree is None:
            tree = self._tree(place, request)
        try:
            bucket = tree(request.dims)
        except KeyError:
            bucket = None  # sizes by other names than this family has
        if bucket is None:
            return None if self._differs(request.op) else BUCKET_MISS
        upper = self._rules_above(policy)
        if upper is not None and not any(rule.applies(request) for rule in upper):
            return bucket
        needs, got = f"the table's policy {self._policy[:12]}", policy.digest[:12]
        return Rejected(Reason.DISPATCH_TABLE_POLICY_DIFFERS, "policy", needs, got, "the table solved again")

    def is_solved_under(self, policy: Policy) -> bool:
        """Whether this is the very policy that it was solved under."""
        return self._policy == policy.digest

    def problem(self, policy: Policy) -> str:
        """Why the table decides nothing under a process's policy; empty where it decides."""
        refusal = self.refusal or next(filter(None, map(self._differs, sorted(self._ops))), "")
        if refusal or self._rules_above(policy) is not None:
            return refusal
        return f"{self.path}: it was solved under another policy, and is not solved again yet"

    def under(
        self, policy: Policy, kernels: Mapping[str, Kernel], options: SelectionOptions
    ) -> ActiveDispatchTable:
        """The table with each range decided again under another policy, from the costs that it states.

        Ops that no rule concerns which the file's policy did not have stay as they are. Those with a rule
        that asks for more than the op are left to the file's decisions and run time: it may cut a range.
        """
        original = self.original
        assert original.table is not None
        above = original._rules_above(policy)
        added = policy.rules if above is None else above
        buckets, left_ops = [], set[str]()
        for bucket in original.table.buckets:
            concerned = [rule for rule in added if rule.concerns(bucket.op)]
            if any(rule.when or rule.kind is not None for rule in concerned):
                left_ops.add(bucket.op)
            elif above is not None and not concerned:
                buckets.append(bucket)
            elif (decided := _decided_again(bucket, policy, kernels, options)) is not None:
                buckets.append(decided)
        count = len(buckets)
        log.info(
            SOLVED_AGAIN, path=self.path, policy=policy.digest[:12], buckets=count, left=sorted(left_ops)
        )
        again = msgspec.structs.replace(original.table, policy=policy.digest, buckets=tuple(buckets))
        differs = original._differs
        left = frozenset(left_ops)
        return ActiveDispatchTable(again, self.path, differs=differs, original=original, left_ops=left)

    def _rules_above(self, policy: Policy) -> tuple[Rule, ...] | None:
        """The rules of the upper layers without which `policy` is the table's; None where it never is."""
        digest = policy.digest
        if digest not in self._upper_rules:
            if len(self._upper_rules) >= _MAX_REMEMBERED:
                self._upper_rules.clear()
            layers = _without_upper_layers(policy)
            self._upper_rules[digest] = next((up for rest, up in layers if rest.digest == self._policy), None)
        return self._upper_rules[digest]

    def _tree(self, place: Hashable, request: CallSpec) -> Lookup[Bucket]:
        """The comparisons of a request's family, compiled when it is first asked for."""
        buckets = self._buckets.get(family_of(request), [])
        if self._differs(request.op):
            buckets = []
        tree = _NOTHING
        try:
            if buckets:
                tree = compile_lookup([Entry(bucket.ranges, bucket) for bucket in buckets])
        except (ValueError, RecursionError) as error:
            log.error(TABLE_REFUSED, path=self.path, op=request.op, why=str(error))
        if len(self._trees) >= _MAX_REMEMBERED:
            self._trees.clear()
        self._trees[place] = tree
        return tree


def _decided_again(
    bucket: Bucket, policy: Policy, kernels: Mapping[str, Kernel], options: SelectionOptions
) -> Bucket | None:
    """A range decided under another policy; None where that needs a price which the range does not have.

    No kernel that has one may be left, or a rule may prefer one without, as kernels have in files of older
    formats and where they take a part of the range.
    """
    request = CallSpec(
        op=bucket.op,
        dtype=bucket.dtype,
        dtypes=bucket.dtypes,
        dims={axis: last for axis, (_, last) in bucket.ranges.items()},
        features=frozenset(bucket.features),
        layout=bucket.layout,
        contiguous=bucket.contiguous,
    )
    rules = policy.for_request(request)
    pool = []
    for kernel_id, us in bucket.costs.items():
        kernel = kernels.get(kernel_id)
        verdict = rules.verdict(kernel_id, kernel.backend) if kernel is not None else None
        if kernel is not None and verdict is not None and verdict.allowed:
            accepted = Accepted(us, 0.0, verdict.boost.apply(us), bucket.cost_source)
            pool.append(Candidate(kernel_id, kernel.backend, accepted))
    unpriced = (k for k in kernels.values() if k.op == bucket.op and k.id not in bucket.costs)
    verdicts = (rules.verdict(k.id, k.backend) for k in unpriced)
    if not pool or any(verdict.allowed and verdict.boost.apply(1.0) < 1.0 for verdict in verdicts):
        return None
    chosen, why = pick(pool, kernels, options)
    if chosen.accepted is not None and chosen.accepted.total_us > bucket.costs[chosen.kernel]:
        return None  # all that have a price are avoided
    if chosen.kernel == bucket.kernel:
        return bucket
    us = bucket.costs[chosen.kernel]
    scale = us / bucket.expected_us if bucket.expected_us else 1.0
    return msgspec.structs.replace(
        bucket,
        kernel=chosen.kernel,
        why=f"{why}, under policy {policy.digest[:12]}",
        expected_us=us,
        floor_us=bucket.floor_us * scale,
        multiple=bucket.multiple * scale,
    )


def _without_upper_layers(policy: Policy) -> Iterator[tuple[Policy, tuple[Rule, ...]]]:
    """A policy without its upper layers, ever more of them, and their rules.

    Rules that do not apply to a request have no bearing on it: it is decided as under the rest.
    """
    yield policy, ()
    for layer in sorted({rule.layer for rule in policy.rules}, reverse=True):
        below = tuple(rule for rule in policy.rules if rule.layer < layer)
        yield Policy(below), tuple(rule for rule in policy.rules if rule.layer >= layer)


def kernels_differ(
    table: DispatchTable, path: str, platform: str, kernels_of: Callable[[str], Iterable[Kernel]]
) -> Callable[[str], str]:
    """A function of an op: what of its kernels is not as the table has it, empty where all is.

    An op is looked at when it is first asked for: a first call need not wait for the kernels of all others.
    `kernels_of` gives those of an op, and all of them for "*".
    """

    @functools.cache
    def digest_of(op: str) -> str:
        kernels = kernels_of(op)
        return capabilities_hash(kernels) if op == EVERY_OP else limits_of(op, kernels, platform)

    @functools.cache
    def differs(op: str) -> str:
        name = EVERY_OP if EVERY_OP in table.limits else op
        if table.limits.get(name) == digest_of(name):
            return ""
        why = f"{path}: kernels of {op} or their limits have changed since: solve again"
        log.error(TABLE_REFUSED, path=path, why=why)
        return why

    return differs


def activate(
    path: str | os.PathLike[str],
    hardware: Hardware,
    kernels_of: Callable[[str], Iterable[Kernel]],
    *,
    strict: bool,
) -> ActiveDispatchTable:
    """The table of a file, if it holds for this device; else refused, with a logged reason.

    Raises: ConfigurationError: it does not hold, and `strict` is set.
    """
    try:
        table = DispatchTable.load(path)
        differences = table.hardware.differences(Environment.of_hardware(hardware))
        if differences:
            raise ConfigurationError(f"{path}: it was solved for another machine: {'; '.join(differences)}")
        differs = kernels_differ(table, str(path), hardware.platform, kernels_of)
        changed = next(filter(None, (differs(bucket.op) for bucket in table.buckets)), "") if strict else ""
        if changed:
            raise ConfigurationError(changed)
    except (CacheCorruptionError, ConfigurationError) as error:
        if strict:
            raise ConfigurationError(str(error), path=str(path)) from error
        log.error(TABLE_REFUSED, path=str(path), why=str(error))
        return ActiveDispatchTable(None, str(path), str(error))
    return ActiveDispatchTable(table, str(path), differs=differs)
