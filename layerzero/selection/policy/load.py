"""Policies from a YAML file and from the environment: pure functions, so the caller keeps its last good one.

A file looks like this; each rule has exactly one of lock, deny, allow, boost, prefer, avoid:

    version: 1
    rules:
      - lock: flashinfer
        op: attention/causal
        when: Sq > 1024
      - deny: [flash_attn.*, xformers]
        note: wrong results on this driver
      - boost: triton_kernels.*
        factor: 0.8
        add_us: 5
      - prefer: liger
        op: rms_norm
        until: 2026-12-01T00:00:00Z
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Any

import msgspec

from layerzero._util.strict_yaml import path_in, quote
from layerzero.selection.policy.names import UnknownName, check_names
from layerzero.selection.policy.policy import EMPTY, Policy
from layerzero.selection.policy.rules import AVOIDED, PREFERRED, Action, Layer, Rule, make_rule
from layerzero.spec.errors import PolicyLoadError, PolicyValidationError
from layerzero.spec.user_file import UserFile

FORMAT_VERSION = 1
MAX_RULES = 1000

_ACTIONS: Mapping[str, tuple[Action, float]] = {
    "lock": ("lock", 1.0),
    "deny": ("deny", 1.0),
    "allow": ("allow", 1.0),
    "boost": ("boost", 1.0),
    "prefer": ("boost", PREFERRED),
    "avoid": ("boost", AVOIDED),
}
_VARIABLES: Mapping[str, str] = {f"LAYERZERO_{word.upper()}": word for word in _ACTIONS if word != "boost"}


class _RuleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lock: str | None = None
    deny: str | list[str] | None = None
    allow: str | list[str] | None = None
    boost: str | list[str] | None = None
    prefer: str | list[str] | None = None
    avoid: str | list[str] | None = None
    op: str = "*"
    when: str | list[str] = ()  # type: ignore[assignment]  # an empty tuple is the only immutable default
    factor: float | None = None
    add_us: float | None = None
    until: str | None = None
    note: str = ""


class _PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = FORMAT_VERSION
    rules: list[_RuleEntry] = []


class LoadedPolicy(msgspec.Struct, frozen=True):
    """A policy read from outside, and what was odd about it: rules that name nothing known here."""

    policy: Policy
    findings: tuple[UnknownName, ...] = ()


def load_policy(path: str | os.PathLike[str], **options: Any) -> LoadedPolicy:
    """Read the policy file at `path`; `options` as in `parse_policy`.

    Raises: PolicyLoadError: also where the file is missing or unreadable.
    """
    return _policy_of(UserFile(path, kind=PolicyLoadError), **options)


def parse_policy(data: bytes, name: str, **options: Any) -> LoadedPolicy:
    """The policy in YAML `data`; `name` is the file's in errors and sources.

    `known_ops` and `known_kernels` turn on the check of names: what is unknown here is a finding, or an
    error where `strict`. An `until` of wall-clock time becomes monotonic through `clock` and `wall`.

    Raises: PolicyLoadError: anything that is not a valid policy, with the file and the line.
    """
    return _policy_of(UserFile(name, data, PolicyLoadError), **options)


def _policy_of(
    file: UserFile,
    *,
    known_ops: AbstractSet[str] | None = None,
    known_kernels: AbstractSet[str] | None = None,
    strict: bool = False,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> LoadedPolicy:
    offset = clock() - wall()
    rules: list[Rule] = []
    for index, entry in enumerate(_decode(file).rules):
        try:
            rules.append(_rule(entry, offset, f"{file.path}:{file.line_of('rules', index)}"))
        except PolicyValidationError as error:
            field = str(error).partition(" ")[0]
            raise file.error(("rules", index, field), str(error)) from error
    policy = Policy(tuple(rules)) if rules else EMPTY
    findings = check_names(policy, known_ops=known_ops, known_kernels=known_kernels)
    if findings and strict:
        first = findings[0]
        index = next(i for i, rule in enumerate(rules) if rule is first.rule)
        raise file.error(("rules", index), first.message)
    return LoadedPolicy(policy, findings)


def environment_policy(env: Mapping[str, str] | None = None) -> Policy:
    """The policy in LAYERZERO_LOCK, _DENY, _ALLOW, _PREFER and _AVOID.

    Each holds patterns separated by commas; `op=pattern` limits one to an op, and LAYERZERO_LOCK requires it:
    `LAYERZERO_LOCK=attention/causal=flashinfer,rms_norm=liger`.

    Raises: PolicyValidationError: a variable does not parse; the message names it.
    """
    variables = os.environ if env is None else env
    rules: list[Rule] = []
    for variable, word in _VARIABLES.items():
        action, factor = _ACTIONS[word]
        for item in variables.get(variable, "").replace(";", ",").split(","):
            if not item.strip():
                continue
            op, separator, pattern = item.strip().rpartition("=")
            try:
                if action == "lock" and not separator:
                    raise PolicyValidationError(f"needs op=kernel, got {quote(item.strip())}")
                pattern, op = pattern.strip(), op.strip() if separator else "*"
                rule = make_rule(
                    action, pattern, op=op, factor=factor, layer=Layer.ENVIRONMENT, source=variable
                )
                rules.append(rule)
            except PolicyValidationError as error:
                raise PolicyValidationError(f"{variable}: {error}", variable=variable) from error
    return Policy(tuple(rules)) if rules else EMPTY


def _monotonic(text: str, offset: float) -> float:
    """The wall-clock time in `text` on the monotonic clock, which is `offset` seconds from it."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise PolicyValidationError(
            f"until needs a time such as 2026-12-01T00:00:00Z, got {quote(text)}"
        ) from error
    if moment.tzinfo is None:
        raise PolicyValidationError(f"until needs a time zone (Z or +00:00), got {quote(text)}")
    return moment.timestamp() + offset


def _rule(entry: _RuleEntry, offset: float, source: str) -> Rule:
    used = [word for word in _ACTIONS if getattr(entry, word) is not None]
    if len(used) != 1:
        got = " and ".join(used) or "none of them"
        raise PolicyValidationError(f"a rule needs exactly one of {', '.join(_ACTIONS)}, got {got}")
    word = used[0]
    action, factor = _ACTIONS[word]
    if word != "boost":
        for name in ("factor", "add_us"):
            if getattr(entry, name) is not None:
                raise PolicyValidationError(f"{name} belongs to boost, got it with {word}")
    elif entry.factor is None and entry.add_us is None:
        raise PolicyValidationError("boost needs factor or add_us")
    return make_rule(
        action,
        getattr(entry, word),
        op=entry.op,
        when=entry.when,
        factor=factor if entry.factor is None else entry.factor,
        add_us=0.0 if entry.add_us is None else entry.add_us,
        layer=Layer.FILE,
        until=None if entry.until is None else _monotonic(entry.until, offset),
        source=source,
        note=entry.note,
    )


def _decode(file: UserFile) -> _PolicyFile:
    value = file.value
    file.refuse_unknown(value, _PolicyFile.__struct_fields__, "field")
    version = value.get("version", FORMAT_VERSION)
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise file.error(("version",), f"version needs {FORMAT_VERSION}, got {quote(version)}")
    rules = value.get("rules")
    if isinstance(rules, list):
        if len(rules) > MAX_RULES:
            message = f"rules needs at most {MAX_RULES} entries, got {len(rules)}"
            raise file.error(("rules", MAX_RULES), message)
        for index, entry in enumerate(rules):
            if isinstance(entry, dict):
                known = _RuleEntry.__struct_fields__
                file.refuse_unknown(entry, known, "field of a rule", ("rules", index))
    try:
        return msgspec.convert(value, _PolicyFile)
    except msgspec.ValidationError as error:
        place = path_in(str(error))
        field = ".".join(map(str, place)) or "the file"
        message = str(error).partition(" - at ")[0]
        raise file.error(place, f"{field}: {message}") from error
