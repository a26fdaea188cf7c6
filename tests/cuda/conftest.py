"""Tests of this folder say in code that they want a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_device_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the contract tests is no setting: a runtime that reads the environment refuses it."""
    monkeypatch.delenv("LAYERZERO_TEST_DEVICE", raising=False)
