"""Capability files of then: limits of format 1 were records, and some fields came later."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from layerzero.spec.errors import CacheCorruptionError

_SPELLING: Mapping[str, str] = {
    "AtLeast": "{dim} >= {value}",
    "AtMost": "{dim} <= {value}",
    "MultipleOf": "{dim} % {value} == 0",
    "OneOf": "{dim} in {values}",
    "SameAs": "{dim} == {other}",
    "ProductAtMost": "{dims} <= {value}",
}
_SAID_BY_DEFAULT = ("SIZE_UNSUPPORTED",)


def changed_error(path: str | os.PathLike[str]) -> CacheCorruptionError:
    """The error of a document that is not as it was written."""
    return CacheCorruptionError(f"{path}: its kernels do not match its content hash", path=str(path))


# Fields that came while the format stayed, and what a file from before them means.
_LATER: Mapping[str, Any] = {"only_with": []}


def fill_later_fields(
    path: str | os.PathLike[str],
    kernels: dict[str, dict[str, Any]],
    content: object,
    digest: Callable[[Mapping[str, Any]], str],
) -> bool:
    """Give a document's kernels the fields that it was written before; whether one lacked any.

    Raises: CacheCorruptionError: one did, and the `digest` as it was written is not `content`, where given.
    """
    written, lacked = digest(kernels), False
    for entry in kernels.values():
        for name, meant in _LATER.items():
            lacked = lacked or name not in entry["capability"]
            entry["capability"].setdefault(name, list(meant))
    if lacked and content is not None and written != content:
        raise changed_error(path)
    return lacked


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
