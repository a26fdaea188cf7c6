"""Capability files of format 1: its limits were records, which are conditions now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPELLING: Mapping[str, str] = {
    "AtLeast": "{dim} >= {value}",
    "AtMost": "{dim} <= {value}",
    "MultipleOf": "{dim} % {value} == 0",
    "OneOf": "{dim} in {values}",
    "SameAs": "{dim} == {other}",
    "ProductAtMost": "{dims} <= {value}",
}
_SAID_BY_DEFAULT = ("SIZE_UNSUPPORTED",)


def respell(capability: dict[str, Any]) -> None:
    """Spell the limits of one kernel as conditions, in place.

    Raises: KeyError, TypeError, AttributeError: one is no limit of format 1.
    """
    if isinstance(limits := capability.get("limits"), list):
        capability["limits"] = [_spelled(limit) for limit in limits]


def _spelled(limit: Mapping[str, Any]) -> str:
    """A limit of format 1 as a condition.

    Raises: KeyError, TypeError, AttributeError: it is none.
    """
    values = {**limit, "dims": " * ".join(limit.get("dims", ()))}
    text = _SPELLING[limit["type"]].format_map(values)
    when, reason = limit.get("when", ""), limit.get("reason", "SIZE_UNSUPPORTED")
    text += f" when {when}" if when else ""
    return text + (f" else {reason}" if reason not in _SAID_BY_DEFAULT else "")
