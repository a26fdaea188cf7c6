"""How many examples a property gets: `@many_examples` for one whose body takes a millisecond or less."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

CI = os.environ.get("HYPOTHESIS_PROFILE", "default") == "ci"
MANY = 10_000 if CI else 300


def many_examples(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a cheap property on 10,000 examples under the CI profile, on 300 otherwise."""
    marked: Callable[..., Any] = pytest.mark.timeout(600)(settings(max_examples=MANY)(test))
    return marked
