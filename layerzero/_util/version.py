"""The version of this package, in one place, and those of the distributions that are installed beside it."""

from __future__ import annotations

import importlib.metadata

VERSION = "0.1.0"


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where there is none of that name."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
