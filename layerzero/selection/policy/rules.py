"""Rules of a policy: lock, deny, allow and boost, each with patterns, an op, conditions and a layer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from fnmatch import translate
from functools import lru_cache
from typing import Literal, TypeGuard

import msgspec

from layerzero._util.strict_yaml import quote, suggestion
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.condition import FLAGS, Condition, parse_conditions
from layerzero.spec.errors import PolicyValidationError

Action = Literal["lock", "deny", "allow", "boost"]

MAX_FACTOR = 1e6
PREFERRED = 1e-3
AVOIDED = 1e3

_PATTERN = re.compile(r"[a-z0-9_.*?\[\]!-]{1,96}")
_OP = re.compile(r"(?P<op>[a-z*?\[][a-z0-9_*?\[\]!-]{0,47})(?:[/.](?P<kind>[a-z][a-z0-9_]{0,47}))?")
_GLOB = frozenset("*?[")


class Layer(IntEnum):
    """Where a rule comes from; a higher layer overrides a lower one."""

    FILE = 0
    ENVIRONMENT = 1
    PROGRAM = 2
    CONTEXT = 3
    REQUEST = 4


class CostChange(msgspec.Struct, frozen=True):
    """A change of expected cost: `cost_us * factor + add_us`, never below zero; below 1 favours a kernel."""

    factor: float = 1.0
    add_us: float = 0.0

    def apply(self, cost_us: float) -> float:
        """The cost after this change, in microseconds."""
        return max(0.0, cost_us * self.factor + self.add_us)

    def then(self, other: CostChange) -> CostChange:
        """This change followed by `other`, as one."""
        return CostChange(self.factor * other.factor, self.add_us * other.factor + other.add_us)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a policy.

    `patterns` are globs; one of them must match the kernel id or the backend name. `op` is an op name or a
    glob over op names; `kind` is a feature or mode the request must have (`causal`). `until` ends a timeboxed
    rule, in seconds of the monotonic clock. `source` is where a reader finds the rule: `policy.yaml:12`,
    `LAYERZERO_DENY`.
    """

    action: Action
    patterns: tuple[str, ...]
    op: str = "*"
    kind: str | None = None
    when: tuple[Condition, ...] = ()
    boost: CostChange = CostChange()
    layer: Layer = Layer.PROGRAM
    until: float | None = None
    source: str = "program"
    note: str = ""

    @property
    def word(self) -> str:
        """What a file calls it: `lock`, `prefer`, `boost`."""
        return _word(self.action, self.boost.factor, self.boost.add_us)

    @property
    def effect(self) -> str:
        """What it does, as a file spells it: `lock`, `prefer`, `boost x0.8 +5 us`."""
        word, boost = self.word, self.boost
        return f"boost x{boost.factor:g} {boost.add_us:+g} us" if word == "boost" else word

    def matches(self, kernel_id: str, backend: str) -> bool:
        """Whether one of the patterns names this kernel or its backend."""
        literal, glob = _matcher(self.patterns)
        if kernel_id in literal or backend in literal:
            return True
        return glob is not None and (glob(kernel_id) is not None or glob(backend) is not None)

    def concerns(self, op: str) -> bool:
        """Whether the rule is about an op, by name or by glob."""
        return self.op in ("*", op) or (is_glob(self.op) and _op_matcher(self.op)(op) is not None)

    def applies(self, request: CallSpec) -> bool:
        """Whether op, kind and every condition hold for `request`."""
        if not self.concerns(request.op):
            return False
        if self.kind is not None and self.kind not in request.features and self.kind not in request.modes:
            return False
        return all(condition.holds(request) for condition in self.when)

    @property
    def target(self) -> str:
        """The op with its kind, as it is written: `attention/causal`."""
        return self.op if self.kind is None else f"{self.op}/{self.kind}"

    def __str__(self) -> str:
        scope = "" if self.target == "*" else f" for {self.target}"
        when = f" when {' and '.join(map(str, self.when))}" if self.when else ""
        note = f": {self.note}" if self.note else ""
        return f"{self.word} {', '.join(self.patterns)}{scope}{when} ({self.source}){note}"


def make_rule(
    action: Action,
    patterns: str | Sequence[str],
    *,
    op: str = "*",
    when: str | Sequence[str] = (),
    factor: float = 1.0,
    add_us: float = 0.0,
    layer: Layer = Layer.PROGRAM,
    until: float | None = None,
    source: str = "program",
    note: str = "",
) -> Rule:
    """Check and build one rule; `op` may be a glob and carry a kind: `attention/causal`, `*_norm`.

    Raises: PolicyValidationError: a pattern, op, condition or number is not what the field takes.
    """
    word = _word(action, factor, add_us)
    if not isinstance(patterns, Iterable):
        raise PolicyValidationError(f"{word} needs a glob or several, got {quote(patterns)}")
    if not isinstance(when, Iterable):
        raise PolicyValidationError(f"when needs a condition or several, got {quote(when)}")
    globs = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not globs:
        raise PolicyValidationError(f"{word} needs at least one pattern")
    for glob in globs:
        if not isinstance(glob, str) or not _PATTERN.fullmatch(glob):
            raise PolicyValidationError(
                f"{word} needs a glob over kernel ids (a-z 0-9 _ . * ?, at most 96 long), got {quote(glob)}"
            )
    if action == "lock" and len(globs) != 1:
        raise PolicyValidationError(f"lock needs exactly one kernel or backend, got {len(globs)}")
    name, kind = split_op(op)
    if action == "lock" and not name.strip("*"):
        raise PolicyValidationError(f"lock needs an op, got {quote(name)}")
    _check_boost(factor, add_us)
    if until is not None and not _is_finite(until):
        raise PolicyValidationError(f"until needs a finite time, got {quote(until)}")
    return Rule(
        action=action,
        patterns=globs,
        op=name,
        kind=kind,
        when=parse_conditions(when if isinstance(when, str) else list(when)),
        boost=CostChange(float(factor), float(add_us)),
        layer=layer,
        until=until,
        source=source,
        note=note,
    )


def _word(action: Action, factor: float, add_us: float) -> str:
    """The word for a rule in files and programs, which have names for two boosts."""
    if action != "boost" or add_us:
        return action
    return "prefer" if factor == PREFERRED else "avoid" if factor == AVOIDED else action


def split_op(text: str) -> tuple[str, str | None]:
    """The op and the kind in `attention`, `attention/causal`, `attention.causal`, `rms_*` or `*`.

    Raises: PolicyValidationError: the text is none of them, or the kind is no feature or mode.
    """
    match = _OP.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise PolicyValidationError(
            f"op needs a name or glob such as attention, attention/causal or *_norm, got {quote(text)}"
        )
    kind = match["kind"]
    if kind is not None and kind not in FLAGS:
        raise PolicyValidationError(f"op {text!r} names unknown kind {kind!r}: {suggestion(kind, FLAGS)}")
    return match["op"], kind


def is_glob(op: str) -> bool:
    """Whether an op of a rule is a glob, not a name."""
    return not _GLOB.isdisjoint(op)


@lru_cache(maxsize=4096)
def _op_matcher(op: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(translate(op)).match


@lru_cache(maxsize=4096)
def _matcher(
    patterns: tuple[str, ...],
) -> tuple[frozenset[str], Callable[[str], re.Match[str] | None] | None]:
    """The plain names in `patterns`, and one compiled test for all the globs."""
    globs = [p for p in patterns if is_glob(p)]
    test = re.compile("|".join(map(translate, globs))).match if globs else None
    return frozenset(patterns) - frozenset(globs), test


def _check_boost(factor: float, add_us: float) -> None:
    if not _is_number(factor) or not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
        raise PolicyValidationError(
            f"factor needs a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}, got {quote(factor)}"
        )
    if not _is_finite(add_us):
        raise PolicyValidationError(f"add_us needs a finite number of microseconds, got {quote(add_us)}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float holds."""
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max
