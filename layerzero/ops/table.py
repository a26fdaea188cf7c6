"""The table of ops: ask here for an op by name; its file is imported when it is first asked for."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable

from layerzero.ops.files import FILES as FILES
from layerzero.ops.op import OPS, Op
from layerzero.spec.errors import UnknownOpError


def get(name: str) -> Op:
    """The op of that name.

    Raises: UnknownOpError: there is none; the message lists the ops, nearest names first.
    """
    if not isinstance(name, str):
        raise TypeError(f"op needs an op's name, got {type(name).__name__}")
    op = OPS.get(name)
    if op is not None:
        return op
    file = FILES.get(name)
    if file is not None:
        importlib.import_module(f"layerzero.ops.{file}")
        return OPS[name]
    op_names = names()
    close = difflib.get_close_matches(name, op_names, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UnknownOpError(
        f"op needs an op's name, got the unknown op {name!r}; {hint}ops: {', '.join(op_names)}"
    )


def need_names(ops: Iterable[str] | None) -> None:
    """Raises: TypeError: `ops` is one text, which is a list of letters. UnknownOpError: as `get`."""
    if isinstance(ops, str):
        raise TypeError(f"ops needs a list of names, got {ops!r}: write [{ops!r}]")
    for name in ops or ():
        get(name)


def names() -> tuple[str, ...]:
    """Every op's name, in alphabetical order."""
    return tuple(sorted({*FILES, *OPS}))
