"""The chain and its verdicts: precedence of actions and layers, digests, timeboxes, and the rule index."""

from __future__ import annotations

import os
import subprocess
import sys
from fnmatch import fnmatchcase
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.selection.policy.policy import EMPTY, NO_BOOST, Policy, describe, merge
from layerzero.selection.policy.rules import AVOIDED, PREFERRED, Action, CostChange, Layer, Rule, make_rule
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import PolicyValidationError
from layerzero.spec.reasons import Reason

CAUSAL = CallSpec(op="attention", dims={"Sq": 2048, "D": 64}, features=frozenset({"causal"}))
FLASH = ("flash_attn.attention", "flash_attn")
TORCH = ("torch_sdpa.attention.math", "torch_sdpa")


def policy(*rules: Rule) -> Policy:
    return Policy(rules)


def codes(value: Policy, kernel: tuple[str, str], request: CallSpec = CAUSAL) -> list[Reason]:
    verdict = value.verdict(*kernel, request)
    assert verdict.allowed is (not verdict.reasons)
    return [rejected.reason for rejected in verdict.reasons]


def test_an_empty_policy_allows_all_and_changes_no_cost() -> None:
    """Without rules every kernel passes at its own cost (EC-033)."""
    verdict = EMPTY.verdict(*FLASH, CAUSAL)
    assert verdict.allowed and verdict.boost.apply(7.5) == 7.5 and verdict.lock is None and not EMPTY


def test_deny_beats_allow() -> None:
    """A kernel that is both allowed and denied is denied, in either order and layer (EC-035)."""
    deny, allow = make_rule("deny", "flash_attn*"), make_rule("allow", "flash_attn")
    high = make_rule("allow", "flash_attn", layer=Layer.REQUEST)
    for value in (policy(deny, allow), policy(allow, deny), policy(deny, high)):
        assert codes(value, FLASH) == [Reason.POLICY_DENIED]


def test_an_allow_list_refuses_the_rest_with_its_source() -> None:
    """What no allow rule names is refused, and the reason says where the list stands."""
    value = policy(make_rule("allow", ["torch*"], source="p.yaml:3"))
    assert codes(value, TORCH) == [] and codes(value, FLASH) == [Reason.POLICY_NOT_ALLOWED]
    assert "torch* (p.yaml:3)" in str(value.verdict(*FLASH, CAUSAL).reasons[0])


def test_the_highest_layer_with_an_allow_list_decides() -> None:
    """A list from above replaces the one below; within a layer lists join."""
    low = make_rule("allow", "torch*", layer=Layer.FILE)
    high = make_rule("allow", "flash_attn", layer=Layer.ENVIRONMENT)
    assert codes(policy(low, high), TORCH) == [Reason.POLICY_NOT_ALLOWED]
    assert codes(policy(low, high), FLASH) == []
    both = policy(low, make_rule("allow", "flash_attn", layer=Layer.FILE))
    assert codes(both, TORCH) == codes(both, FLASH) == []


def test_lock_of_attention_causal_to_a_backend() -> None:
    """Under the lock one backend serves causal attention; other requests stay free (T7)."""
    value = policy(make_rule("lock", "flash_attn", op="attention.causal"))
    assert codes(value, FLASH) == [] and codes(value, TORCH) == [Reason.LOCKED_TO_ANOTHER]
    plain = CAUSAL.replace(features=frozenset())
    assert codes(value, TORCH, plain) == [] and value.for_request(plain).lock is None
    locked = value.for_request(CAUSAL).lock
    assert locked is not None and locked.patterns == ("flash_attn",)


@pytest.mark.parametrize("low", list(Layer)[:-1])
def test_locks_of_higher_layers_win(low: Layer) -> None:
    """Request over context over program over environment over file, whatever the order of merging (T38)."""
    high = Layer(low + 1)
    below = policy(make_rule("lock", "flash_attn", op="attention", layer=low))
    above = policy(make_rule("lock", "torch_sdpa", op="attention", layer=high))
    for value in (merge(below, above), merge(above, below)):
        assert codes(value, TORCH) == [] and codes(value, FLASH) == [Reason.LOCKED_TO_ANOTHER]


def test_within_a_layer_the_later_lock_wins() -> None:
    """The chain is ordered: the last applicable lock decides."""
    first = make_rule("lock", "flash_attn", op="attention")
    second = make_rule("lock", "torch_sdpa", op="attention", when="Sq > 1024")
    assert codes(policy(first, second), TORCH) == []
    assert codes(policy(first, second), TORCH, CAUSAL.replace(dims={"Sq": 8})) == [Reason.LOCKED_TO_ANOTHER]


def test_a_lock_beats_denials_up_to_its_layer_only() -> None:
    """Locking a denied kernel takes it; a denial from above the lock stands."""
    lock = make_rule("lock", "flash_attn", op="attention", layer=Layer.PROGRAM)
    below = make_rule("deny", "flash_attn", layer=Layer.FILE)
    above = make_rule("deny", "flash_attn", layer=Layer.CONTEXT)
    beside = make_rule("deny", "flash_attn", layer=Layer.PROGRAM)
    assert codes(policy(lock, below, beside), FLASH) == []
    assert codes(policy(lock, below, above), FLASH) == [Reason.POLICY_DENIED]


def test_a_locked_kernel_needs_no_place_in_an_allow_list() -> None:
    """What is locked is taken though the list names others alone; a list from above the lock stands."""
    allow = make_rule("allow", "torch_sdpa")
    lock = make_rule("lock", "flash_attn", op="attention")
    above = make_rule("allow", "torch_sdpa", layer=Layer.CONTEXT)
    assert codes(policy(allow), FLASH) == [Reason.POLICY_NOT_ALLOWED]
    assert codes(policy(allow, lock), FLASH) == []
    assert codes(policy(allow, lock, above), FLASH) == [Reason.POLICY_NOT_ALLOWED]


def test_every_reason_is_listed() -> None:
    """A kernel with a denial, no allowance and a lock elsewhere hears all three."""
    value = policy(
        make_rule("deny", "flash_attn"),
        make_rule("deny", "flash*"),
        make_rule("allow", "torch*"),
        make_rule("lock", "torch_sdpa", op="attention"),
    )
    assert codes(value, FLASH) == [
        Reason.POLICY_DENIED,
        Reason.POLICY_DENIED,
        Reason.LOCKED_TO_ANOTHER,
        Reason.POLICY_NOT_ALLOWED,
    ]


def test_boosts_compose_in_chain_order() -> None:
    """Each boost works on the cost that the one before left, and never goes below zero."""
    value = policy(
        make_rule("boost", "flash*", factor=0.5, add_us=10.0), make_rule("boost", "flash_attn.*", factor=2.0)
    )
    assert value.verdict(*FLASH, CAUSAL).boost.apply(100.0) == (100.0 * 0.5 + 10.0) * 2.0
    assert value.verdict(*TORCH, CAUSAL).boost == NO_BOOST
    assert CostChange(1.0, -50.0).apply(20.0) == 0.0
    assert PREFERRED < 1.0 < AVOIDED


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("flash_attn", True),
        ("flash_attn.*", True),
        ("flash_attn.attention", True),
        ("*.attention", True),
        ("fl?sh*", True),
        ("*", True),
        ("flash", False),
        ("attention", False),
        ("flash_attn.attention.v3", False),
    ],
)
def test_patterns_are_globs_over_ids_and_backends(pattern: str, matches: bool) -> None:
    """A pattern names a kernel id or a backend whole; dots are dots."""
    assert make_rule("deny", pattern).matches(*FLASH) is matches


def test_a_glob_made_to_backtrack_is_quick() -> None:
    """The worst glob the alphabet allows is answered; the suite's timeout is the limit."""
    rule = make_rule("deny", "*a" * 40 + "b")
    assert rule.matches("a" * 96, "a" * 96) is False


@pytest.mark.parametrize(
    ("action", "patterns", "fields", "needs"),
    [
        ("deny", "Flash", {}, "glob over kernel ids"),
        ("deny", "a/../b", {}, "glob over kernel ids"),
        ("deny", "a" * 97, {}, "glob over kernel ids"),
        ("deny", "a\x00b", {}, "glob over kernel ids"),
        ("deny", [], {}, "at least one pattern"),
        ("lock", ["a", "b"], {"op": "attention"}, "exactly one"),
        ("lock", "a", {}, "needs an op"),
        ("deny", "a", {"op": "Attention"}, "op needs a name"),
        ("deny", "a", {"op": "attention/casual"}, "did you mean 'causal'"),
        ("boost", "a", {"factor": 0.0}, "factor needs"),
        ("boost", "a", {"factor": float("nan")}, "factor needs"),
        ("boost", "a", {"factor": "big"}, "factor needs"),
        ("boost", "a", {"add_us": float("inf")}, "add_us needs"),
        ("deny", "a", {"until": float("nan")}, "until needs"),
        ("deny", "a", {"when": "nonsense"}, "when names unknown field"),
    ],
)
def test_a_bad_rule_is_refused_by_field(
    action: Action, patterns: str | list[str], fields: dict[str, object], needs: str
) -> None:
    """Patterns, ops, numbers and conditions are checked when the rule is made (FS-029)."""
    with pytest.raises(PolicyValidationError, match=needs):
        make_rule(action, patterns, **fields)  # type: ignore[arg-type]


def test_timeboxed_rules_end() -> None:
    """`at` gives the policy in force and the time of its next change, on a clock that is passed in."""
    lasting = make_rule("deny", "flash_attn")
    short = make_rule("deny", "torch_sdpa", until=10.0)
    longer = make_rule("boost", "torch*", factor=0.5, until=20.0)
    value = policy(lasting, short, longer)
    assert value.active_at(0.0).policy is value and value.active_at(0.0).next_change == 10.0
    after = value.active_at(10.0)
    assert after.policy.rules == (lasting, longer) and after.next_change == 20.0
    assert value.active_at(20.0).policy.rules == (lasting,) and value.active_at(20.0).next_change is None
    assert policy(lasting).active_at(5.0).policy == policy(lasting)


def test_the_digest_is_of_meaning() -> None:
    """Where a rule was written and when it ends do not count; what it says, and its layer, do."""
    rule = make_rule("deny", "flash_attn", op="attention", when="Sq > 8", source="a.yaml:3", note="x")
    same = make_rule("deny", "flash_attn", op="attention", when="Sq  >  8", source="b.yaml:9", until=5.0)
    assert policy(rule).digest == policy(same).digest
    others = [
        make_rule("allow", "flash_attn", op="attention", when="Sq > 8"),
        make_rule("deny", "flash_attn", op="attention", when="Sq > 9"),
        make_rule("deny", "flash_attn", op="attention/causal", when="Sq > 8"),
        make_rule("deny", "flash_attn", when="Sq > 8"),
        make_rule("deny", "flash_att", op="attention", when="Sq > 8"),
        make_rule("deny", "flash_attn", op="attention", when="Sq > 8", layer=Layer.FILE),
    ]
    digests = {policy(rule).digest, *(policy(other).digest for other in others), EMPTY.digest}
    assert len(digests) == len(others) + 2


def test_the_digest_is_stable_across_processes() -> None:
    """Another interpreter with another hash seed computes the same digest."""
    code = (
        "from layerzero.selection.policy import Policy, make_rule;"
        "rule = make_rule('boost', ['b.*', 'a'], op='attention/causal', when='D in [64]', factor=0.1);"
        "digest = Policy((rule,)).digest"
    )
    here: dict[str, Any] = {}
    exec(code, here)  # this process has drawn a hash seed of its own
    other = subprocess.run(
        [sys.executable, "-c", code + "; print(digest)"],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(here["digest"]) == 64 and other.strip() == here["digest"]


def test_conditions_that_a_key_must_separate_are_listed() -> None:
    """Every condition and kind that can concern an op is listed once; other ops' are not."""
    value = policy(
        make_rule("deny", "a", op="attention/causal", when="Sq > 8"),
        make_rule("deny", "b", when="Sq > 8 and dtype == float16"),
        make_rule("deny", "c", op="rms_norm", when="C > 8"),
    )
    assert [str(c) for c in value.conditions("attention")] == ["Sq > 8", "dtype == float16", "causal"]
    assert [str(c) for c in value.conditions("linear")] == ["Sq > 8", "dtype == float16"]


class CountedSizes(dict[str, int]):
    """Sizes that count how often one is read."""

    reads = 0

    def get(self, axis: str, default: int | None = None) -> int | None:  # type: ignore[override]
        self.reads += 1
        return super().get(axis, default)


def test_a_request_pays_for_its_own_op_s_distinct_conditions_only() -> None:
    """100 rules, 10 ops, 5 conditions: one request reads 5 sizes, however many kernels ask (PS-004)."""
    ops = ["attention", *(f"op{n}" for n in range(9))]
    value = policy(
        *(make_rule("deny", f"b{n}.*", op=ops[n % 10], when=f"Sq > {n // 20}") for n in range(100))
    )
    sizes = CountedSizes(Sq=2)
    facing = value.for_request(CallSpec(op="attention", dims=sizes))
    verdicts = [facing.verdict(f"b{n}.attention", f"b{n}") for n in range(100)]
    assert sizes.reads == 5
    assert [n for n, verdict in enumerate(verdicts) if not verdict.allowed] == [0, 10, 20, 30]


def test_a_policy_describes_itself() -> None:
    """The chain comes out as plain values, in reading order."""
    value = policy(
        make_rule("deny", "a", op="attention/causal", when="Sq > 8"), make_rule("lock", "b", op="rope")
    )
    assert [(d["action"], d["op"], d["when"]) for d in describe(value)] == [
        ("deny", "attention/causal", ["Sq > 8"]),
        ("lock", "rope", []),
    ]
    assert str(value.rules[0]) == "deny a for attention/causal when Sq > 8 (program)"


def test_merging_nothing_is_nothing() -> None:
    """Empty layers cost no object: one filled layer comes back as it is."""
    only = policy(make_rule("deny", "a"))
    assert merge() is EMPTY and merge(EMPTY, EMPTY) is EMPTY and merge(EMPTY, only, EMPTY) is only


PATTERNS = ("flash_attn", "flash_attn.*", "torch*", "*", "torch_sdpa", "liger", "*.math")
WHENS = ("", "Sq > 64", "Sq <= 64", "D == 64", "causal", "not causal", "dtype == float32")
OPS = ("attention", "attention/causal", "linear")
# Every rule that these words make: picking one whole costs a property less than drawing each of its words.
RULES = [
    make_rule(action, pattern, op=op, when=when or (), factor=factor, layer=layer)
    for action in get_args(Action)
    for pattern in PATTERNS
    for op in (OPS if action == "lock" else ("*", *OPS))
    for when in WHENS
    for factor in ((0.5, 2.0) if action == "boost" else (1.0,))
    for layer in Layer
]


# Those that concern every call of attention: a chain of them seldom agrees with itself.
MEETING = [
    make_rule(action, pattern, op="attention" if action == "lock" else "*", layer=layer)
    for action in ("lock", "deny", "allow")
    for pattern in ("flash_attn", "torch*", "liger")
    for layer in Layer
]


requests = st.builds(
    lambda op, sq, d, causal: CallSpec(
        op=op, dims={"Sq": sq, "D": d}, features=frozenset({"causal"} if causal else ())
    ),
    st.sampled_from(["attention", "linear", "rope"]),
    st.sampled_from([1, 64, 65]),
    st.sampled_from([64, 128]),
    st.booleans(),
)


def naive(chain: list[Rule], kernel: tuple[str, str], request: CallSpec) -> tuple[set[Reason], float]:
    """The rules of the module docstring, written as directly as they read."""
    ordered = [r for r in sorted(chain, key=lambda r: r.layer) if r.applies(request)]

    def names(rule: Rule) -> bool:
        return any(fnmatchcase(word, p) for p in rule.patterns for word in kernel)

    locks = [r for r in ordered if r.action == "lock"]
    lock = locks[-1] if locks else None
    locked = lock is not None and names(lock)
    reasons: set[Reason] = set()
    for rule in ordered:
        spared = locked and lock is not None and rule.layer <= lock.layer
        if rule.action == "deny" and names(rule) and not spared:
            reasons.add(Reason.POLICY_DENIED)
    if lock is not None and not locked:
        reasons.add(Reason.LOCKED_TO_ANOTHER)
    allows = [r for r in ordered if r.action == "allow"]
    top = max((r.layer for r in allows), default=Layer.FILE)
    spared = locked and lock is not None and top <= lock.layer
    if allows and not spared and not any(names(r) for r in allows if r.layer == top):
        reasons.add(Reason.POLICY_NOT_ALLOWED)
    cost = 100.0
    for rule in ordered:
        if rule.action == "boost" and names(rule):
            cost = cost * rule.boost.factor + rule.boost.add_us
    return reasons, cost


@given(
    st.lists(st.one_of(st.sampled_from(RULES), st.sampled_from(MEETING)), max_size=8),
    requests,
    st.sampled_from([FLASH, TORCH, ("liger.linear", "liger")]),
)
def test_the_index_gives_what_the_words_say(
    chain: list[Rule], request: CallSpec, kernel: tuple[str, str]
) -> None:
    """The bit index agrees with a direct reading of the precedence rules, reason by reason and in cost."""
    value = Policy(tuple(chain))
    verdict = value.verdict(*kernel, request)
    reasons, cost = naive(chain, kernel, request)
    assert {rejected.reason for rejected in verdict.reasons} == reasons
    assert verdict.boost.apply(100.0) == pytest.approx(cost)
    assert value.for_request(request).verdict(*kernel) == verdict
