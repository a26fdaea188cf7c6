"""How many examples a property gets: the two marks are for one whose body takes a millisecond or less."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

CI = os.environ.get("HYPOTHESIS_PROFILE", "default") == "ci"
STRESS = os.environ.get("LZ_STRESS") == "1"
MANY = 10_000 if STRESS else 1_000 if CI else 300
MOST = 10_000 if STRESS or CI else 300
CALLS = 25

Test = Callable[..., Any]


def _examples(count: int, test: Test) -> Test:
    marked: Test = pytest.mark.timeout(600)(settings(max_examples=count)(test))
    return marked


def many_examples(test: Test) -> Test:
    """Run a cheap property on 1,000 examples under the CI profile, on 10,000 with LZ_STRESS=1, or on 300."""
    return _examples(MANY, test)


def most_calls(test: Test) -> Test:
    """Run what keys and descriptions rest on with 10,000 calls in both, on 300 otherwise.

    An example is a seed of CALLS calls: drawn one by one they take hypothesis four times as long as the test.
    """
    return _examples(MOST // CALLS, test)
