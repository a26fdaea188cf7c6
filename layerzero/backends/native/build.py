"""The C++ kernels of this folder: the wheel's, else compiled on the user's machine."""

from __future__ import annotations

import functools
from typing import Any

from layerzero.native import compiling


@functools.cache
def library(name: str = "layerzero_native") -> Any:
    """The module, compiling it first where neither the wheel nor this user has it; takes up to a minute.

    Raises: BackendNotAvailableError: no compiler, a compile error, or a cache folder that others can write.
    """
    return compiling.library(name).get()
