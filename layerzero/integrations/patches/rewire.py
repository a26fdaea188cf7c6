"""Functions of other people's files with some of the names that they read replaced, for one object alone."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


class _Globals(dict[str, Any]):
    """A file's names as they are when they are read, but for those that are in here."""

    def __init__(self, file: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__({"__builtins__": file["__builtins__"], **replaced})
        self.file = file

    def __missing__(self, name: str) -> Any:
        return self.file[name]


def reads(function: Any) -> tuple[str, ...]:
    """The names that a plain function reads of its file and of what it finds there; none of anything else."""
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def rebind(function: Any, replaced: dict[str, Any], *, traced: bool = False) -> Callable[..., Any]:
    """A copy of `function` that reads these names as given; the file itself stays as it is.

    `traced`: one that torch's compiler follows, with the file's names as they are now.
    """
    names: dict[str, Any] = _Globals(function.__globals__, replaced)
    if traced:
        names = {**function.__globals__, **replaced}
        del names["__name__"]  # by which the compiler would read the file's names instead
    copied = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
