"""Backends: one file each, the only place that imports a vendor's library; they do not know each other.

A new backend is one file with `KERNELS`, one line in `BUILTIN` and a test file. A third party announces a
function that returns its kernels in the entry point group `layerzero.backends`; it is loaded only when named.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Collection

from layerzero.errors import BackendNotAvailableError, ConfigurationError
from layerzero.kernel import Kernel, version
from layerzero.reasons import Reason, Rejected

BUILTIN: tuple[str, ...] = (
    "layerzero.backends.native",
    "layerzero.backends.onednn",
    "layerzero.backends.reference",
    "layerzero.backends.torch_native",
    "layerzero.backends.torch_ragged",
    "layerzero.backends.torch_sdpa",
    "layerzero.backends.zentorch",
)
ENTRY_POINT_GROUP = "layerzero.backends"


def load_builtin(allowed_plugins: Collection[str] = ()) -> list[Kernel]:
    """Every kernel of the built-in backends and of the plugins in `allowed_plugins`, by entry point name.

    Imports the modules that describe kernels, never a vendor's library.
    Raises: BackendNotAvailableError: an allowed plugin is not installed or does not import.
        ConfigurationError: two kernels have one id, or a plugin gives something else than kernels.
    """
    kernels = [kernel for name in BUILTIN for kernel in importlib.import_module(name).KERNELS]
    for plugin in sorted(set(allowed_plugins)):
        kernels.extend(_load_plugin(plugin))
    seen: set[str] = set()
    for kernel in kernels:
        if kernel.id in seen:
            raise ConfigurationError(f"two kernels are named {kernel.id!r}; ids need to be unique")
        seen.add(kernel.id)
    return kernels


def _load_plugin(name: str) -> list[Kernel]:
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    if not found:
        raise BackendNotAvailableError(
            f"backend plugin {name!r} is allowed but no installed distribution announces it in the entry "
            f"point group {ENTRY_POINT_GROUP!r}",
            backend=name,
        )
    try:
        announced = next(iter(found)).load()
    except (ImportError, AttributeError) as error:
        message = f"backend plugin {name!r} does not import: {error}"
        raise BackendNotAvailableError(message, backend=name) from error
    kernels = announced() if callable(announced) else announced
    if not isinstance(kernels, tuple | list) or not all(isinstance(kernel, Kernel) for kernel in kernels):
        raise ConfigurationError(
            f"backend plugin {name!r} needs to give a sequence of Kernel, got {type(kernels).__name__}"
        )
    return list(kernels)


def availability(kernel: Kernel) -> list[Rejected]:
    """Why `kernel`'s libraries cannot serve here, from installed metadata alone; empty where they can."""
    verdicts = (_check_distribution(requirement) for requirement in kernel.distributions)
    return [verdict for verdict in verdicts if verdict is not None]


# `name`, `name>=1.2`, `name>=1.2,<2`: what nearly every kernel asks for, compared by numbers alone.
_SIMPLE = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:>=(?P<least>\d+(?:\.\d+)*))?(?:,?<(?P<below>\d+(?:\.\d+)*))?"
)
_RELEASE = re.compile(r"\d+(?:\.\d+)*(?:\+.*)?")


def _holds_simply(text: str) -> bool:
    """Whether an installed release satisfies a plain requirement; False also where that takes a closer look.

    `packaging` decides everything else, but importing it costs the first call of a process 20 ms.
    """
    simple = _SIMPLE.fullmatch(text)
    if simple is None:
        return False
    try:
        found = importlib.metadata.version(simple["name"])
    except importlib.metadata.PackageNotFoundError:
        return False
    if not _RELEASE.fullmatch(found):
        return False
    here, least, below = (_numbers(v) for v in (found, simple["least"], simple["below"]))
    return least <= here and (not below or here < below)


def _numbers(text: str | None) -> tuple[int, ...]:
    """A version's numbers without trailing zeros, so that 2.13 and 2.13.0 are equal."""
    numbers = list(version(text or ""))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@functools.cache
def _check_distribution(text: str) -> Rejected | None:
    if _holds_simply(text):
        return None
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ConfigurationError(f"distributions needs requirement strings, got {text!r}: {error}") from error
    needs, fix = str(requirement.specifier) or "any version", f"pip install '{text}'"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Rejected(Reason.BACKEND_MISSING, requirement.name, needs, "not installed", fix)
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return Rejected(Reason.BACKEND_VERSION_MISMATCH, requirement.name, needs, found, fix)
