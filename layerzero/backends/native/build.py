"""The C++ kernels of this folder as one library, compiled on the user's machine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from layerzero.native.compiling import CppModule

SOURCE = Path(__file__).with_name("attention.cpp")
# No fast-math: it would reorder sums, and bits would depend on the rows beside them.
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")


@functools.cache
def library() -> Any:
    """The compiled module, compiling it first where this user has not yet; takes up to a minute.

    Raises: BackendNotAvailableError: no compiler, a compile error, or a cache folder that others can write.
    """
    return CppModule("layerzero_native", SOURCE, FLAGS).get()
