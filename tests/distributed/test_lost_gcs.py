"""The end of a driver whose cluster has lost its GCS, as docs/reference/limits.md tells it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import asyncio, json, os
from ray.cluster_utils import Cluster
import layerzero as lz
from tests.distributed.conftest import BARE

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **BARE})
processes = cluster.head_node.all_processes


async def main():
    settings = lz.Settings(cluster=cluster.address, cluster_devices=1, device="cpu", state_dir=None)
    try:
        async with lz.start(settings):
            pids = {kind: [each.process.pid for each in started] for kind, started in processes.items()}
            print(json.dumps(pids), flush=True)
            while True:
                await asyncio.sleep(0.1)
    finally:
        print("an exception came", flush=True)


asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.slow
def test_ray_ends_a_driver_whose_gcs_is_gone_and_no_exception_comes(ray: object) -> None:
    """After `RAY_gcs_rpc_server_reconnect_timeout_s` the process ends with status 1 and Ray's words."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
    started: dict[str, list[int]] = {}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    ) as driver:
        assert driver.stdout is not None
        try:
            started = json.loads(next(line for line in driver.stdout if line.startswith("{")))
            assert driver.poll() is None
            for pid in started["gcs_server"]:
                os.kill(pid, signal.SIGKILL)
            rest, errors = driver.communicate(timeout=200)
        finally:
            driver.kill()
            for pid in (pid for pids in started.values() for pid in pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert driver.returncode == 1 and rest == "", errors[-2000:]
    assert "Failed to connect to GCS within 2 seconds" in errors
