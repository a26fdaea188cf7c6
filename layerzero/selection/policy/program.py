"""What a program asks for: locks that stay, preferences for a block, a backend for one call. All pure."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from layerzero._util.strict_yaml import suggestion
from layerzero.selection.policy.names import raise_for_unknown
from layerzero.selection.policy.policy import EMPTY, Policy
from layerzero.selection.policy.rules import PREFERRED, Action, Layer, is_glob, make_rule, split_op
from layerzero.spec.errors import PolicyValidationError


def lock(
    policy: Policy,
    op: str,
    target: str,
    *,
    known_ops: AbstractSet[str] | None = None,
    known_kernels: AbstractSet[str] | None = None,
    when: str | Sequence[str] = (),
    until: float | None = None,
) -> Policy:
    """`policy` with `op` (or `op/kind`) locked to `target`, a kernel id, a backend or a glob of either.

    An earlier lock of the same op, kind and conditions is replaced. `known_kernels` are the op's, by id.

    Raises: PolicyValidationError: `op` or `target` is unknown, or does not parse.
    """
    rule = make_rule("lock", target, op=op, when=when, until=until, source=f"lock({op!r}, {target!r})")
    raise_for_unknown(Policy((rule,)), known_ops=known_ops, known_kernels=known_kernels)
    place = ("lock", Layer.PROGRAM, rule.op, rule.kind, rule.when)
    others = (r for r in policy.rules if (r.action, r.layer, r.op, r.kind, r.when) != place)
    return Policy((*others, rule))


def unlock(policy: Policy, op: str | None = None, *, known_ops: AbstractSet[str] | None = None) -> Policy:
    """`policy` without the program's locks of `op` (or `op/kind`); None removes all of them.

    Locks from a file or the environment stay. An op without a lock changes nothing.

    Raises: PolicyValidationError: `op` is unknown, or does not parse.
    """
    name, kind = (None, None) if op is None else split_op(op)
    if name is not None and known_ops is not None and name not in known_ops and not is_glob(name):
        raise PolicyValidationError(f"unknown op {name!r}: {suggestion(name, known_ops)}")
    remaining = tuple(
        rule
        for rule in policy.rules
        if rule.action != "lock"
        or rule.layer is not Layer.PROGRAM
        or (name is not None and (rule.op != name or (kind is not None and rule.kind != kind)))
    )
    if len(remaining) == len(policy.rules):
        return policy
    return Policy(remaining) if remaining else EMPTY


def get_locks(policy: Policy) -> dict[str, str]:
    """Op (`op/kind`) to kernel or backend, for the locks in force; a higher layer hides a lower one's."""
    locks: dict[str, str] = {}
    for rule in policy.rules:
        if rule.action == "lock":
            when = f" when {' and '.join(map(str, rule.when))}" if rule.when else ""
            locks[rule.target + when] = rule.patterns[0]
    return locks


def preference(
    *patterns: str, op: str = "*", until: float | None = None, layer: Layer = Layer.CONTEXT
) -> Policy:
    """A layer that makes matching kernels look a thousand times cheaper: taken wherever they are accepted."""
    return _one_rule("boost", "prefer", patterns, op=op, factor=PREFERRED, until=until, layer=layer)


def exclusion(
    *patterns: str, op: str = "*", until: float | None = None, layer: Layer = Layer.CONTEXT
) -> Policy:
    """A layer that denies matching kernels."""
    return _one_rule("deny", "disable", patterns, op=op, until=until, layer=layer)


def allow_only(*patterns: str, op: str = "*") -> Policy:
    """A layer that allows nothing but matching kernels: the references, for a block that wants no other."""
    return _one_rule("allow", "only", patterns, op=op, layer=Layer.CONTEXT)


def _one_rule(action: Action, word: str, patterns: tuple[str, ...], **fields: Any) -> Policy:
    source = f"{word}({', '.join(map(repr, patterns))})"
    return Policy((make_rule(action, patterns, source=source, **fields),))


def request_lock(
    op: str,
    backend: str,
    *,
    known_ops: AbstractSet[str] | None = None,
    known_kernels: AbstractSet[str] | None = None,
) -> Policy:
    """The layer of one call's `backend=`: a lock above every other layer.

    Raises: PolicyValidationError: `backend` names no kernel in `known_kernels`.
    """
    rule = make_rule("lock", backend, op=op, layer=Layer.REQUEST, source=f"backend={backend!r}")
    policy = Policy((rule,))
    raise_for_unknown(policy, known_ops=known_ops, known_kernels=known_kernels)
    return policy
