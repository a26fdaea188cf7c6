"""Conditions of a rule on a request: `Sq > 1024`, `head_dim == 64`, `dtype in [float16]`, `not causal`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from layerzero._util.strict_yaml import quote, suggestion
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import ACTIVATIONS, FEATURE_REASONS
from layerzero.spec.errors import PolicyValidationError

Operator = Literal["==", "!=", ">", ">=", "<", "<=", "in", "not in", "like", "is", "is not"]

# Longer names of the axes in layerzero/spec/call_spec.py.
AXES = {
    "batch": "B",
    "heads": "Hq",
    "kv_heads": "Hk",
    "seq_q": "Sq",
    "seq_k": "Sk",
    "head_dim": "D",
    "head_dim_v": "Dv",
    "rows": "N",
    "width": "C",
    "vocab": "V",
    "group": "G",
    "page_size": "P",
}
TEXTS = frozenset({"dtype", "device", "platform", "layout"})
NUMBERS = frozenset({"alignment"})
SWITCHES = frozenset({"contiguous", "last_stride1"})
MODES = frozenset({"grad", "deterministic", "batch_invariant", "capture", "autocast", "tp_invariant"})
FLAGS = frozenset(FEATURE_REASONS) | {f"act_{name}" for name in ACTIVATIONS} | SWITCHES | MODES
FIELDS = frozenset(AXES) | TEXTS | NUMBERS | FLAGS

_AXIS = re.compile(r"[A-Z][a-z]?")
_NAME = r"(?P<field>[A-Za-z][A-Za-z0-9_]{0,47})"
_FLAG = re.compile(rf"(?P<negated>not\s+)?{_NAME}")
_COMPARE = re.compile(rf"{_NAME}\s*(?P<operator>==|!=|>=|<=|>|<)\s*(?P<value>[^\s=<>!]+)")
_MEMBER = re.compile(rf"{_NAME}\s+(?P<operator>not\s+in|in)\s+\[(?P<value>[^\[\]]*)\]")
_LIKE = re.compile(rf"{_NAME}\s+like\s+(?P<value>[A-Za-z0-9_.:*?-]{{1,64}})")
_TEXT = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class Condition(msgspec.Struct, frozen=True):
    """One test of one field; a size that a request does not have satisfies no condition on it."""

    field: str
    operator: Operator
    value: int | str | tuple[int, ...] | tuple[str, ...] | None = None

    @property
    def axis(self) -> str | None:
        """The axis this condition reads, or None where it reads something else."""
        return self.field if _AXIS.fullmatch(self.field) else None

    def holds(self, request: CallSpec) -> bool:
        """Whether `request` satisfies this condition."""
        field, operator = self.field, self.operator
        if operator == "is" or operator == "is not":
            return _has_flag(request, field) is (operator == "is")
        got = request.dims.get(field) if _AXIS.fullmatch(field) else getattr(request, field)
        return got is not None and _compare(got, operator, self.value)

    def __str__(self) -> str:
        if self.operator in ("is", "is not"):
            return self.field if self.operator == "is" else f"not {self.field}"
        value = f"[{', '.join(map(str, self.value))}]" if isinstance(self.value, tuple) else self.value
        return f"{self.field} {self.operator} {value}"


def parse_conditions(texts: str | list[str] | tuple[str, ...]) -> tuple[Condition, ...]:
    """Conditions that must all hold, from one text or several; `and` joins within a text.

    Raises: PolicyValidationError: the text does not parse, or names a field that no request has.

    Example:
        >>> [str(condition) for condition in parse_conditions("seq_q > 1024 and not causal")]
        ['Sq > 1024', 'not causal']
    """
    parts = [texts] if isinstance(texts, str) else texts
    return tuple(_parse_one(clause.strip()) for part in parts for clause in re.split(r"\s+and\s+", part))


def _parse_one(text: str) -> Condition:
    for pattern in (_COMPARE, _MEMBER, _LIKE, _FLAG):
        match = pattern.fullmatch(text)
        if match:
            break
    else:
        raise PolicyValidationError(
            f"when needs `field > number`, `field == word`, `field in [a, b]`, `field like glob*`, `flag` or "
            f"`not flag`, got {quote(text)}"
        )
    field = _field_of(match["field"], text)
    groups = match.groupdict()
    if pattern is _FLAG:
        if field not in FLAGS:
            raise PolicyValidationError(f"when needs a comparison for {field}, got {quote(text)}")
        return Condition(field, "is not" if groups["negated"] else "is")
    if field in FLAGS:
        raise PolicyValidationError(f"when needs `{field}` or `not {field}`, got {quote(text)}")
    if pattern is _LIKE:
        _require(field in TEXTS, f"a word field ({', '.join(sorted(TEXTS))}) for like", text)
        return Condition(field, "like", groups["value"])
    operator = " ".join(groups["operator"].split())
    if pattern is _MEMBER:
        items = [item.strip() for item in groups["value"].split(",") if item.strip()]
        _require(bool(items), "at least one value in [...]", text)
        if field in TEXTS:
            return Condition(field, _as_operator(operator), tuple(_word(item, text) for item in items))
        return Condition(field, _as_operator(operator), tuple(_number(item, text) for item in items))
    if field in TEXTS:
        _require(operator in ("==", "!="), f"== or != for {field}", text)
        return Condition(field, _as_operator(operator), _word(groups["value"], text))
    return Condition(field, _as_operator(operator), _number(groups["value"], text))


def _field_of(field: str, text: str) -> str:
    if field in AXES:
        return AXES[field]
    if field in FIELDS or _AXIS.fullmatch(field):
        return field
    axis = field.capitalize()
    hint = f"did you mean {axis!r}?" if axis in AXES.values() else suggestion(field, FIELDS)
    raise PolicyValidationError(f"when names unknown field {field!r} in {quote(text)}: {hint}")


def _as_operator(text: str) -> Operator:
    operators: dict[str, Operator] = {
        "==": "==", "!=": "!=", ">": ">", ">=": ">=", "<": "<", "<=": "<=", "in": "in", "not in": "not in",
    }  # fmt: skip
    return operators[text]


def _number(item: str, text: str) -> int:
    _require(re.fullmatch(r"-?[0-9]{1,15}", item) is not None, "a whole number", text)
    return int(item)


def _word(item: str, text: str) -> str:
    word = item.strip("'\"")
    _require(_TEXT.fullmatch(word) is not None, "a word", text)
    return word


def _require(holds: bool, needs: str, text: str) -> None:
    if not holds:
        raise PolicyValidationError(f"when needs {needs}, got {quote(text)}")


def _has_flag(request: CallSpec, name: str) -> bool:
    if name in SWITCHES:
        return bool(getattr(request, name))
    return name in request.features or name in request.modes


def _compare(got: int | str, operator: Operator, value: object) -> bool:
    if operator == "==":
        return got == value
    if operator == "!=":
        return got != value
    if isinstance(value, tuple):
        return (got in value) is (operator == "in")
    if isinstance(got, str):
        return fnmatchcase(got, str(value))
    if not isinstance(value, int):
        return False
    if operator == ">":
        return got > value
    if operator == ">=":
        return got >= value
    return got < value if operator == "<" else got <= value
