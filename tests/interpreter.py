"""Whether Triton's interpreter runs here, and how it looks at its own language less often."""

from __future__ import annotations

import functools
import inspect
from importlib import metadata
from typing import Any

from layerzero.spec.kernel import version


@functools.cache
def why_not() -> str:
    """What is wrong with the interpreter of this installation; empty where it works."""
    try:
        triton, numpy = metadata.version("triton"), metadata.version("numpy")
    except metadata.PackageNotFoundError as missing:
        return f"{missing.name} is not installed"
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} does not know numpy {numpy}; Triton 3.7 or numpy 2.3 do"
    return ""


def remember_builtins() -> None:
    """Let the interpreter of this process list the functions of Triton's language once.

    It puts its own in their places whenever one kernel's function calls another, and looks for them among all
    that a module or a class has: half of a small program's time. Which they are does not change.
    """
    from triton.runtime import interpreter

    named: dict[Any, list[str]] = {}

    def patch(package: Any, builder: Any, *scope: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in named:
            named[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in named[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch
