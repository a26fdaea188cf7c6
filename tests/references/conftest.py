"""Which definitions are run, where, and how near: `pytest tests/references --op-type gemm --on cuda`.

--op-type KIND           only this kind of op; may be given again
--definition-name GLOB   only definitions of such a name; may be given again
--all                    the large ones too, and experts at the sizes of their source
--tolerance FACTOR       times the table's tolerances (LZ_TOLERANCE, else 1)
--on DEVICE              cpu or cuda; a card where there is one
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import layerzero as lz
from tests.references.definitions import files


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    device: torch.device
    tolerance: float
    everything: bool


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the module's docstring."""
    group = parser.getgroup("definitions", "published definitions of ops")
    group.addoption("--op-type", action="append", default=[], metavar="KIND")
    group.addoption("--definition-name", action="append", default=[], metavar="GLOB")
    group.addoption("--all", action="store_true", default=False)
    group.addoption("--tolerance", type=float, default=None, metavar="FACTOR")
    group.addoption("--on", default=None, metavar="DEVICE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the definitions that were asked for.

    Raises: pytest.UsageError: no definition is of that kind or name, or see `_wishes`.
    """
    _wishes(config)
    kinds, globs = config.getoption("--op-type", []) or [], config.getoption("--definition-name", []) or []
    known = files()
    kinds_known = {path.parent.name for path in known}
    lost = [("--op-type", word) for word in kinds if word not in kinds_known]
    lost += [
        ("--definition-name", glob) for glob in globs if not any(fnmatchcase(p.stem, glob) for p in known)
    ]
    if lost:
        option, word = lost[0]
        held = ", ".join(sorted(kinds_known)) or "none: LZ_DEFINITIONS is unset"
        raise pytest.UsageError(f"{option} needs what a definition has, got {word!r}; kinds of ops: {held}")

    def is_asked_for(path: Path) -> bool:
        named = not globs or any(fnmatchcase(path.stem, glob) for glob in globs)
        return named and (not kinds or path.parent.name in kinds)

    paths = {item: item.callspec.params.get("path") for item in items if isinstance(item, pytest.Function)
             and hasattr(item, "callspec")}  # fmt: skip
    dropped = [item for item, path in paths.items() if isinstance(path, Path) and not is_asked_for(path)]
    if dropped and (kinds or globs):
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _wishes(config: pytest.Config) -> Asked:
    """What the command line says, with what holds where it says nothing.

    Raises: pytest.UsageError: no such tolerance or device.
    """
    factor, device = config.getoption("--tolerance", None), config.getoption("--on", None)
    if factor is None:
        factor = float(os.environ.get("LZ_TOLERANCE", "1"))
    if not 0 < factor < 1e6:
        raise pytest.UsageError(f"--tolerance needs a factor above 0, got {factor:g}")
    has_card = torch.cuda.is_available()
    if device not in (None, "cpu", "cuda"):
        raise pytest.UsageError(f"--on needs cpu or cuda, got {device!r}")
    if device == "cuda" and not has_card:
        raise pytest.UsageError("--on needs a card for cuda, got a machine without one")
    where = torch.device(device or ("cuda" if has_card else "cpu"))
    return Asked(where, factor, bool(config.getoption("--all", False)))


@pytest.fixture(scope="session")
def asked(request: pytest.FixtureRequest) -> Asked:
    """The command line's wishes."""
    return _wishes(request.config)


@pytest.fixture(scope="module")
def runtime(asked: Asked) -> Iterator[lz.Runtime]:
    """A runtime whose choices do not change while they are compared."""
    settings = lz.Settings.load(warm="off", device=str(asked.device), inference=True)
    with lz.start(settings, scoped=True) as opened:
        yield opened
