"""A policy: an immutable chain of rules, its digest, and its verdict on one kernel for one request.

How layers combine (file < environment < program < context < request):

    lock    the last applicable one wins; every other kernel is refused
    deny    all apply, in every layer; deny beats allow. A locked kernel is exempt from denials in the
            lock's own layer and below, never from those above it
    allow   the highest layer that has an applicable allow list decides; no list allows everything. A locked
            kernel is exempt from a list of the lock's own layer and below, as from denials
    boost   all apply, in chain order, each to the cost that the one before left
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from layerzero.selection.policy.rules import Action, CostChange, Rule
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.condition import Condition
from layerzero.spec.reasons import Reason, Rejected

NO_BOOST = CostChange()
_MAX_REMEMBERED = 8192


class PolicyVerdict(msgspec.Struct, frozen=True):
    """What a policy says about one kernel for one request.

    `reasons` is empty where `allowed`; `boost` changes the cost; `lock` is the lock that governs the
    request, whichever kernel it names.
    """

    allowed: bool
    reasons: tuple[Rejected, ...] = ()
    boost: CostChange = NO_BOOST
    lock: Rule | None = None


UNRESTRICTED = PolicyVerdict(True)


class ActivePolicy(msgspec.Struct, frozen=True):
    """The policy in force at one moment, and the monotonic time of its next change, if any."""

    policy: Policy
    next_change: float | None


@dataclass(frozen=True)
class Policy:
    """An ordered chain of rules; equal chains have equal digests, in every process."""

    rules: tuple[Rule, ...] = ()
    _by_op: dict[str, _OpRules] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.rules, key=lambda rule: rule.layer))
        object.__setattr__(self, "rules", ordered)

    def verdict(self, kernel_id: str, backend: str, request: CallSpec) -> PolicyVerdict:
        """What this policy says about one kernel; for many kernels of one request use `for_request`."""
        return self.for_request(request).verdict(kernel_id, backend)

    def for_request(self, request: CallSpec) -> RequestPolicy:
        """This policy reduced to the rules that apply to `request`: conditions are tested once."""
        rules = self._by_op.get(request.op)
        if rules is None:
            rules = _OpRules([r for r in self.rules if r.concerns(request.op)])
            if len(self._by_op) < _MAX_REMEMBERED:
                self._by_op[request.op] = rules
        return RequestPolicy(rules, request)

    def always_denies(self, kernel_id: str, backend: str, op: str) -> bool:
        """Whether no request for `op` can get this kernel: a denial without conditions, and no lock on it."""
        named = [rule for rule in self.rules if rule.concerns(op) and rule.matches(kernel_id, backend)]
        always = any(r.action == "deny" and not r.when and r.kind is None and r.until is None for r in named)
        return always and all(rule.action != "lock" for rule in named)

    def conditions(self, op: str) -> tuple[Condition, ...]:
        """Every condition that can change a verdict for `op`, once each, in a stable order.

        A cache key must separate requests that differ in one of them.
        """
        rules = [rule for rule in self.rules if rule.concerns(op)]
        kinds = [Condition(rule.kind, "is") for rule in rules if rule.kind is not None]
        return tuple(dict.fromkeys([*(condition for rule in rules for condition in rule.when), *kinds]))

    def active_at(self, now_s: float) -> ActivePolicy:
        """The policy without the timeboxed rules that have ended at monotonic time `now`."""
        ends = [rule.until for rule in self.rules if rule.until is not None]
        if not ends:
            return ActivePolicy(self, None)
        later_ends = [end for end in ends if end > now_s]
        policy = self
        if len(later_ends) != len(ends):
            policy = Policy(tuple(r for r in self.rules if r.until is None or r.until > now_s))
        return ActivePolicy(policy, min(later_ends, default=None))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the rules mean, in hex; where a rule was written and when it ends do not count."""
        canonical = [
            [r.layer.value, r.action, list(r.patterns), r.op, r.kind, list(map(str, r.when)), r.boost]
            for r in self.rules
        ]
        return hashlib.sha256(msgspec.json.encode(["layerzero-policy-1", canonical])).hexdigest()

    def __bool__(self) -> bool:
        return bool(self.rules)


EMPTY = Policy()


def merge(*policies: Policy) -> Policy:
    """One policy of all the rules; within a layer, rules of a later argument come later in the chain."""
    filled = [policy for policy in policies if policy.rules]
    if len(filled) == 1:
        return filled[0]
    return Policy(tuple(rule for policy in filled for rule in policy.rules)) if filled else EMPTY


class _OpRules:
    """The rules that can concern one op, with one bit each, so that a verdict is a few integer operations."""

    __slots__ = ("_denials", "_matches", "by_action", "of_layer", "rules", "unconditional")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.by_action: dict[Action, int] = {"lock": 0, "deny": 0, "allow": 0, "boost": 0}
        self.of_layer: dict[int, int] = {}
        self.unconditional = 0
        self._matches: dict[tuple[str, str], int] = {}
        self._denials: dict[int, Rejected] = {}
        for index, rule in enumerate(self.rules):
            self.by_action[rule.action] |= 1 << index
            self.of_layer[rule.layer] = self.of_layer.get(rule.layer, 0) | 1 << index
            if not rule.when and rule.kind is None:
                self.unconditional |= 1 << index

    def applicable(self, request: CallSpec) -> int:
        bits = self.unconditional
        results: dict[Condition, bool] = {}
        for index, rule in enumerate(self.rules):
            if bits >> index & 1:
                continue
            if rule.kind is not None and rule.kind not in request.features and rule.kind not in request.modes:
                continue
            for condition in rule.when:
                holds = results.get(condition)
                if holds is None:
                    holds = results[condition] = condition.holds(request)
                if not holds:
                    break
            else:
                bits |= 1 << index
        return bits

    def denial(self, index: int) -> Rejected:
        rejected = self._denials.get(index)
        if rejected is None:
            rule = self.rules[index]
            rejected = Rejected(
                Reason.POLICY_DENIED, "policy", "no rule against it", str(rule), f"no rule by {rule.source}"
            )
            self._denials[index] = rejected
        return rejected

    def matching(self, kernel_id: str, backend: str) -> int:
        name = (kernel_id, backend)
        bits = self._matches.get(name)
        if bits is None:
            bits = sum(1 << i for i, rule in enumerate(self.rules) if rule.matches(kernel_id, backend))
            if len(self._matches) < _MAX_REMEMBERED:
                self._matches[name] = bits
        return bits


class RequestPolicy:
    """The rules that apply to one request; `verdict` asks about one kernel, `lock` is the governing lock."""

    __slots__ = ("_allows", "_bits", "_denies", "_lock_index", "_op", "lock")

    def __init__(self, rules: _OpRules, request: CallSpec) -> None:
        self._op = rules
        self._bits = bits = rules.applicable(request) if rules.rules else 0
        self._lock_index = (bits & rules.by_action["lock"]).bit_length() - 1
        self.lock = rules.rules[self._lock_index] if self._lock_index >= 0 else None
        self._denies = bits & rules.by_action["deny"]
        allows = bits & rules.by_action["allow"]
        if allows:
            allows &= rules.of_layer[rules.rules[allows.bit_length() - 1].layer]
        self._allows = allows

    def verdict(self, kernel_id: str, backend: str) -> PolicyVerdict:
        """What the policy says about one kernel, with every reason against it."""
        if not self._bits:
            return UNRESTRICTED
        rules = self._op
        hits = rules.matching(kernel_id, backend) & self._bits
        lock = self.lock
        locked = lock is not None and hits >> self._lock_index & 1 == 1
        denies, allows = hits & self._denies, self._allows
        if locked and lock is not None:
            for layer, mask in rules.of_layer.items():
                if layer <= lock.layer:
                    denies &= ~mask
                    allows &= ~mask
        reasons = [rules.denial(index) for index in _indices(denies)]
        if lock is not None and not locked:
            by_whom = f"no rule by {lock.source}"
            reasons.append(Rejected(Reason.LOCKED_TO_ANOTHER, "policy", str(lock), kernel_id, by_whom))
        if allows and not hits & allows:
            reasons.append(_not_allowed([rules.rules[index] for index in _indices(allows)], kernel_id))
        boost = NO_BOOST
        for index in _indices(hits & rules.by_action["boost"]):
            boost = boost.then(rules.rules[index].boost)
        if not reasons and boost is NO_BOOST and lock is None:
            return UNRESTRICTED
        return PolicyVerdict(not reasons, tuple(reasons), boost, lock)


def _indices(bits: int) -> Iterable[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _not_allowed(allows: list[Rule], kernel_id: str) -> Rejected:
    names = ", ".join(dict.fromkeys(pattern for rule in allows for pattern in rule.patterns))
    sources = ", ".join(dict.fromkeys(rule.source for rule in allows))
    return Rejected(Reason.POLICY_NOT_ALLOWED, "policy", f"{names} ({sources})", kernel_id)


def describe(policy: Policy) -> list[Mapping[str, object]]:
    """The chain as JSON-ready values, in the order in which it is read."""
    return [
        {
            "layer": rule.layer.name.lower(),
            "action": rule.action,
            "patterns": list(rule.patterns),
            "op": rule.target,
            "when": [str(condition) for condition in rule.when],
            "factor": rule.boost.factor,
            "add_us": rule.boost.add_us,
            "until": rule.until,
            "source": rule.source,
            "note": rule.note,
        }
        for rule in policy.rules
    ]
