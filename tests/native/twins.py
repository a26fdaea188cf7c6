"""Runs a test twice, with the compiled twin of the awaited path and with Python alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.native import HOT
from layerzero.spec.errors import BackendNotAvailableError


@pytest.fixture(autouse=True)
def compiled() -> Iterator[Any]:
    """The module, in use while a test runs; import it into a test module."""
    before = HOT.module
    try:
        yield HOT.load()
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        HOT.use(before)


@pytest.fixture(params=["compiled", "python"], autouse=True)
def both_paths(request: pytest.FixtureRequest) -> Iterator[str]:
    """Import it into a conftest or a test module: every test there runs on both paths."""
    before = HOT.module
    if request.param == "compiled":
        try:
            HOT.load()
        except BackendNotAvailableError as error:
            pytest.skip(f"nothing to compile with: {error}")
    else:
        HOT.use(None)
    yield request.param
    HOT.use(before)
