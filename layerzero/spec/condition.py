"""One language for what may be asked of a call: conditions of policy rules, and limits of kernels.

A condition is `Sq > 1024`, `head_dim == 64`, `dtype in [float16]`, `D % 8 == 0`, `D == Dv`, `B * Hq <= 65535`
or `not causal`. A limit is a condition on sizes, for which calls it holds, and the reason that the others
get: `D <= 128 when mask_bool else HEAD_DIM_TOO_LARGE`. Where it names none, its axis has one.
"""

from __future__ import annotations

import functools
import math
import operator as compare
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from layerzero._util.strict_yaml import quote, suggestion
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import ACTIVATIONS, FEATURE_REASONS
from layerzero.spec.errors import PolicyValidationError
from layerzero.spec.reasons import Reason

Operator = Literal["==", "!=", ">", ">=", "<", "<=", "in", "not in", "like", "%", "is", "is not"]

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
_NOT_SIZES = TEXTS | NUMBERS | FLAGS

_AXIS = re.compile(r"[A-Z][a-z]?")
_NAME = r"(?P<field>[A-Za-z][A-Za-z0-9_]{0,47})"
_PRODUCT = r"(?P<field>[A-Za-z][A-Za-z0-9_]{0,47}(?:\s*\*\s*[A-Za-z][A-Za-z0-9_]{0,47}){0,3})"
_FLAG = re.compile(rf"(?P<negated>not\s+)?{_NAME}")
_COMPARE = re.compile(rf"{_PRODUCT}\s*(?P<operator>==|!=|>=|<=|>|<)\s*(?P<value>[^\s=<>!]+)")
_MULTIPLE = re.compile(rf"{_PRODUCT}\s*%\s*(?P<value>[^\s=<>!]+)\s*==\s*0")
_MEMBER = re.compile(rf"{_NAME}\s+(?P<operator>not\s+in|in)\s+\[(?P<value>[^\[\]]*)\]")
_LIKE = re.compile(rf"{_NAME}\s+like\s+(?P<value>[A-Za-z0-9_.:*?-]{{1,64}})")
_TEXT = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_LIMIT = re.compile(r"(?P<condition>.+?)(?:\s+when\s+(?P<when>\S+))?(?:\s+else\s+(?P<reason>\S+))?")

_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": compare.eq,
    "!=": compare.ne,
    ">": compare.gt,
    ">=": compare.ge,
    "<": compare.lt,
    "<=": compare.le,
    "in": lambda got, values: got in values,
    "not in": lambda got, values: got not in values,
    "like": fnmatchcase,
    "%": lambda got, step: got % step == 0,
}

_HEAD_DIM = {
    "<=": Reason.HEAD_DIM_TOO_LARGE, ">=": Reason.HEAD_DIM_TOO_SMALL, "%": Reason.HEAD_DIM_ALIGNMENT,
    "in": Reason.HEAD_DIM_INVALID, "==": Reason.HEAD_DIMS_DIFFER,
}  # fmt: skip
_LENGTH = {"<=": Reason.SEQ_TOO_LONG, ">=": Reason.SEQ_TOO_SHORT, "==": Reason.SEQ_LENGTHS_DIFFER}
_WIDTH = {"<=": Reason.WIDTH_TOO_LARGE, "%": Reason.WIDTH_ALIGNMENT}
# What a limit on one axis gives where it names no reason; for some axes whatever the limit is.
_BY_AXIS: Mapping[str, Reason | Mapping[str, Reason]] = {
    "D": _HEAD_DIM, "Dv": _HEAD_DIM, "Sq": _LENGTH, "Sk": _LENGTH, "C": _WIDTH, "K": _WIDTH, "F": _WIDTH,
    "B": {"<=": Reason.BATCH_TOO_LARGE, ">=": Reason.BATCH_TOO_SMALL},
    "Hq": Reason.HEADS_UNSUPPORTED, "Hk": Reason.HEADS_UNSUPPORTED, "G": Reason.GROUP_SIZE_UNSUPPORTED,
    "P": Reason.PAGE_SIZE_UNSUPPORTED, "N": Reason.ROWS_UNSUPPORTED, "T": Reason.ROWS_UNSUPPORTED,
}  # fmt: skip


class Condition(msgspec.Struct, frozen=True):
    """One test of one field, or of a product of sizes: beside a number, several, a word or another size.

    A size that a request does not have satisfies no condition on it; in a product it counts as 1.
    """

    field: str
    operator: Operator
    value: int | str | tuple[int, ...] | tuple[str, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that this condition reads; none where it reads something else."""
        if self.field in _NOT_SIZES:
            return ()
        return (*self.field.split(" * "), *((self.value,) if isinstance(self.value, str) else ()))

    def holds(self, request: CallSpec) -> bool:
        """Whether `request` satisfies this condition."""
        field = self.field
        if field in FLAGS:
            return _has_flag(request, field) is (self.operator == "is")
        if field in _NOT_SIZES:
            return _HOLDS[self.operator](getattr(request, field), self.value)
        return self.holds_for(request.dims) is True

    def holds_for(self, dims: Mapping[str, int]) -> bool | None:
        """Whether sizes satisfy a condition on sizes; None where one of them is not there."""
        got = _size(self.field, dims)
        value = dims.get(self.value) if isinstance(self.value, str) else self.value
        return None if got is None or value is None else _HOLDS[self.operator](got, value)

    def __str__(self) -> str:
        if self.operator in ("is", "is not"):
            return self.field if self.operator == "is" else f"not {self.field}"
        value = f"[{', '.join(map(str, self.value))}]" if isinstance(self.value, tuple) else self.value
        return f"{self.field} {self.operator} {value}" + (" == 0" if self.operator == "%" else "")


class Limit(msgspec.Struct, frozen=True):
    """A condition on the sizes that a kernel takes; a call without them is within it.

    With `when` it holds for calls that have that feature or mode; `reason` is what its text says that a call
    beyond it gets, `code` what that call gets.
    """

    condition: Condition
    when: str = ""
    reason: Reason = Reason.SIZE_UNSUPPORTED

    @property
    def dim(self) -> str:
        """What it bounds: an axis, or a product of several."""
        return self.condition.field.replace(" * ", " x ")

    @property
    def code(self) -> Reason:
        """The stated reason; where there is none, the one of its axis and its kind of bound."""
        if self.reason is not Reason.SIZE_UNSUPPORTED:
            return self.reason
        implied = _BY_AXIS.get(self.condition.field, self.reason)
        return implied if isinstance(implied, Reason) else implied.get(self.condition.operator, self.reason)

    def holds(self, dims: Mapping[str, int]) -> bool:
        """Whether sizes are within it."""
        return self.condition.holds_for(dims) is not False

    def needs(self) -> str:
        """What it needs, in the words of a rejection."""
        operator, value = self.condition.operator, self.condition.value
        if operator == "%":
            return f"a multiple of {value}"
        if isinstance(value, tuple):
            return f"{'one' if operator == 'in' else 'none'} of {', '.join(map(str, value))}"
        return f"equal to {value}" if operator == "==" and isinstance(value, str) else f"{operator} {value}"

    def got(self, dims: Mapping[str, int]) -> str:
        """What a call has instead."""
        size, value = str(_size(self.condition.field, dims)), self.condition.value
        return f"{size} and {dims.get(value)}" if isinstance(value, str) else size

    def __str__(self) -> str:
        when = f" when {self.when}" if self.when else ""
        reason = f" else {self.reason.value}" if self.reason is not Reason.SIZE_UNSUPPORTED else ""
        return f"{self.condition}{when}{reason}"


def _size(field: str, dims: Mapping[str, int]) -> int | None:
    if " " not in field:
        return dims.get(field)
    sizes = [dims[axis] for axis in field.split(" * ") if axis in dims]
    return math.prod(sizes) if sizes else None


def parse_conditions(texts: str | list[str] | tuple[str, ...]) -> tuple[Condition, ...]:
    """Conditions that must all hold, from one text or several; `and` joins within a text.

    Raises: PolicyValidationError: the text does not parse, or names a field that no request has.

    Example:
        >>> [str(condition) for condition in parse_conditions("seq_q > 1024 and not causal")]
        ['Sq > 1024', 'not causal']
    """
    parts = [texts] if isinstance(texts, str) else texts
    return tuple(
        _parse_one("when", clause.strip()) for part in parts for clause in re.split(r"\s+and\s+", part)
    )


@functools.cache
def parse_limit(text: str) -> Limit:
    """The limit that a text says.

    Raises: PolicyValidationError: it does not parse, or is no condition on sizes above 0.

    Example:
        >>> parse_limit("D in [64, 128] else HEAD_DIM_INVALID").needs()
        'one of 64, 128'
    """
    match = _LIMIT.fullmatch(text.strip())
    _require("limits", match is not None, "a condition", text)
    assert match is not None
    condition = _parse_one("limits", match["condition"])
    _require("limits", bool(condition.axes), "a condition on sizes", text)
    numbers = condition.value if isinstance(condition.value, tuple) else (condition.value,)
    _require("limits", all(type(n) is str or n >= 1 for n in numbers), "a value of at least 1", text)  # type: ignore[operator]
    when, reason = match["when"] or "", match["reason"] or Reason.SIZE_UNSUPPORTED.value
    _require("limits", when in FLAGS | {""}, "a feature or a mode after when", text)
    _require("limits", reason in Reason.__members__, "a reason after else", text)
    return Limit(condition, when, Reason[reason])


def _parse_one(what: str, text: str) -> Condition:
    for pattern in (_COMPARE, _MULTIPLE, _MEMBER, _LIKE, _FLAG):
        match = pattern.fullmatch(text)
        if match:
            break
    else:
        raise PolicyValidationError(
            f"{what} needs `field > number`, `field == word`, `field in [a, b]`, `field like glob*`, `flag` "
            f"or `not flag`, got {quote(text)}"
        )
    names = [_field_of(what, name.strip(), text) for name in match["field"].split("*")]
    field, groups = " * ".join(names), match.groupdict()
    _require(what, len(names) == 1 or _NOT_SIZES.isdisjoint(names), "sizes in a product", text)
    if pattern is _FLAG:
        if field not in FLAGS:
            raise PolicyValidationError(f"{what} needs a comparison for {field}, got {quote(text)}")
        return Condition(field, "is not" if groups["negated"] else "is")
    if field in FLAGS:
        raise PolicyValidationError(f"{what} needs `{field}` or `not {field}`, got {quote(text)}")
    if pattern is _LIKE:
        _require(what, field in TEXTS, f"a word field ({', '.join(sorted(TEXTS))}) for like", text)
        return Condition(field, "like", groups["value"])
    operator: Any = "%" if pattern is _MULTIPLE else " ".join(groups["operator"].split())
    value_of = _word if field in TEXTS else _number
    if pattern is _MEMBER:
        items = [item.strip() for item in groups["value"].split(",") if item.strip()]
        _require(what, bool(items), "at least one value in [...]", text)
        return Condition(field, operator, tuple(value_of(what, item, text) for item in items))  # type: ignore[arg-type]
    if field in TEXTS:
        _require(what, operator in ("==", "!="), f"== or != for {field}", text)
    other = AXES.get(groups["value"], groups["value"])
    if pattern is _COMPARE and field not in _NOT_SIZES and _AXIS.fullmatch(other):
        return Condition(field, operator, other)
    return Condition(field, operator, value_of(what, groups["value"], text))


def _field_of(what: str, field: str, text: str) -> str:
    if field in AXES:
        return AXES[field]
    if field in FIELDS or _AXIS.fullmatch(field):
        return field
    axis = field.capitalize()
    hint = f"did you mean {axis!r}?" if axis in AXES.values() else suggestion(field, FIELDS)
    raise PolicyValidationError(f"{what} names unknown field {field!r} in {quote(text)}: {hint}")


def _number(what: str, item: str, text: str) -> int:
    _require(what, re.fullmatch(r"-?[0-9]{1,15}", item) is not None, "a whole number", text)
    return int(item)


def _word(what: str, item: str, text: str) -> str:
    word = item.strip("'\"")
    _require(what, _TEXT.fullmatch(word) is not None, "a word", text)
    return word


def _require(what: str, holds: bool, needs: str, text: str) -> None:
    if not holds:
        raise PolicyValidationError(f"{what} needs {needs}, got {quote(text)}")


def _has_flag(request: CallSpec, name: str) -> bool:
    if name in SWITCHES:
        return bool(getattr(request, name))
    return name in request.features or name in request.modes
