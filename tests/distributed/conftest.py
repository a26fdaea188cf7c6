"""Ray for these tests: one logical cluster a module, behind a token, on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

# Ray reads its mode when it is imported, so before any test module can import it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_DEDUP_LOGS", "0")


@pytest.fixture(scope="session")
def ray() -> Any:
    """The library, or a skip that says what to install."""
    return pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")


@pytest.fixture(scope="module")
def ray_cluster(ray: Any) -> Iterator[Any]:
    """A cluster of one node with two logical GPUs, in which this process is the driver."""
    # A cluster of its own, whatever another process has started here meanwhile.
    started = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    ray.init("local", **started, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def no_blocking_calls() -> None:
    """Ray's own client blocks the loop's thread now and then; the hosts' loops are in other processes."""
