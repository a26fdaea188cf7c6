"""The ops, blocking: same names and signatures as the awaitable ones in `layerzero`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.calls import inline_guards as _inline_guards  # noqa: F401  puts itself where graphs are compiled
from layerzero.calls.blocking import blocking as _blocking
from layerzero.ops import table as _table
from layerzero.ops.op import OPS as _OPS

__all__ = sorted(_table.FILES)


def __getattr__(name: str) -> Callable[..., Any]:
    """An op's function, made when it is first asked for."""
    if name not in _table.FILES and name not in _OPS:  # those of plugins are known once they are allowed
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; ops: {', '.join(__all__)}")
    function = globals()[name] = _blocking(_table.get(name))
    return function


def __dir__() -> list[str]:
    return __all__
