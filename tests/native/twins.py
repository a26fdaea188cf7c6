"""Runs a test twice, with the compiled twin of the awaited path and with Python alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from layerzero.native import FAST_PATH
from layerzero.spec.errors import BackendNotAvailableError


@pytest.fixture(autouse=True)
def compiled() -> Iterator[Any]:
    """The module, in use while a test runs; import it into a test module."""
    before = FAST_PATH.module
    try:
        yield FAST_PATH.load()
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        FAST_PATH.use(before)


@pytest.fixture(params=["compiled", "python"], autouse=True)
def both_paths(request: pytest.FixtureRequest) -> Iterator[str]:
    """Import it into a conftest or a test module: every test there runs on both paths."""
    before = FAST_PATH.module
    if request.param == "compiled":
        try:
            FAST_PATH.load()
        except BackendNotAvailableError as error:
            pytest.skip(f"nothing to compile with: {error}")
    else:
        FAST_PATH.use(None)
    yield request.param
    FAST_PATH.use(before)
