"""Do the names in a policy exist? Ops and kernels are injected, so that policies stay plain values."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from layerzero._util.strict_yaml import suggestion
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Layer, Rule
from layerzero.spec.errors import PolicyValidationError


class UnknownName(msgspec.Struct, frozen=True):
    """A rule that names an op or a kernel which is unknown here, in one sentence."""

    rule: Rule
    message: str


def check_names(
    policy: Policy,
    *,
    known_ops: AbstractSet[str] | None = None,
    known_kernels: AbstractSet[str] | None = None,
) -> tuple[UnknownName, ...]:
    """What `policy` names that is not in `known_ops` or `known_kernels`; None skips that check.

    A kernel id begins with its backend, so a pattern is known if it matches an id or that first word.
    """
    findings: list[UnknownName] = []
    for rule in policy.rules:
        if known_ops is not None and not any(map(rule.concerns, known_ops)):
            findings.append(
                UnknownName(rule, f"unknown op {rule.op!r} in {rule}: {suggestion(rule.op, known_ops)}")
            )
        if known_kernels is None:
            continue
        for pattern in rule.patterns:
            alone = msgspec.structs.replace(rule, patterns=(pattern,))
            if not any(alone.matches(kernel, kernel.partition(".")[0]) for kernel in known_kernels):
                names = known_kernels | {kernel.partition(".")[0] for kernel in known_kernels}
                hint = suggestion(pattern, names)
                word = "backend" if rule.layer is Layer.REQUEST else rule.word
                findings.append(UnknownName(rule, f"{word} names no kernel known here: {pattern!r}; {hint}"))
    return tuple(findings)


def raise_for_unknown(
    policy: Policy, *, known_ops: AbstractSet[str] | None, known_kernels: AbstractSet[str] | None
) -> None:
    """Raise for the first unknown name; what a program asks for in so many words must exist.

    Raises: PolicyValidationError: with near matches; `rule` is in its context.
    """
    for finding in check_names(policy, known_ops=known_ops, known_kernels=known_kernels):
        raise PolicyValidationError(finding.message, rule=finding.rule)
