"""Ray for these tests: one node of this machine for all of them, behind a token, gone when they end."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosting.namespaces import Network, shape, why_not
from tests.distributed import worker
from tests.forks import ForkServer

# Ray reads its mode when it is imported, so before any test module can import it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# What else this machine runs is no reason to kill a worker here.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# How long a node may take to start: its server's port, its first answer, its raylet.
START_S = 240
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_S))
os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", str(START_S))

# What no test asks: the log's way to the driver, the autoscaler, the agent's page with its well-known port.
# And workers that find torch imported: its import is most of a new life's time.
BARE = {
    "worker_path": worker.__file__,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "dashboard_agent_listen_port": 0,
    "object_store_memory": 100 << 20,
}


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """The library, with a folder of its own; or a skip that says what to install."""
    library = pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    # A path of a socket has at most 107 bytes, of which Ray takes 70: too many for a folder of pytest's.
    folder = tempfile.mkdtemp(prefix="lz")
    forks = ForkServer(Path(folder) / "forks", worker.MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv(worker.SOCKET, str(forks.path))
        yield library
    forks.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_head(ray: Any) -> Iterator[str]:
    """The address of a node with two logical GPUs: one that ends with this process, or its parent's."""
    if head := os.environ.get("LZ_TEST_HEAD"):
        yield head
        return
    cluster = _begun({"num_cpus": 2, "num_gpus": 2, **BARE})
    assert cluster.address is not None
    yield cluster.address
    cluster.shutdown()


def _begun(node: dict[str, Any]) -> Any:
    """A cluster of one node. Ray would give up one that takes above 30 s, as a busy machine makes it."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    cluster, look = Cluster(), services.get_node

    def patient(*args: Any, **named: Any) -> Any:
        until = time.monotonic() + START_S
        while True:
            try:
                return look(*args, **named)
            except RuntimeError:  # what Ray itself takes for "not yet"
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    services.get_node = patient
    try:
        cluster.add_node(**node)
    finally:
        services.get_node = look
    return cluster


@pytest.fixture(scope="module")
def ray_cluster(ray: Any, ray_head: str) -> Iterator[Any]:
    """This process as a driver of that node."""
    ray.init(address=ray_head, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def laid() -> Iterator[Network]:
    """Two hosts."""
    if why := why_not():
        pytest.skip(why)
    with Network() as network:
        yield network


@pytest.fixture
def hosts(laid: Network) -> Iterator[Network]:
    """The hosts, with a cable that is whole before and after a test."""
    yield laid
    shape(laid.cable, delay_s=0.0, loss=0.0)
