"""Whether Triton's interpreter runs here."""

from __future__ import annotations

import functools
from importlib import metadata

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
