"""`lz consistency --cluster`: two devices behind one address, asked by a process that joins for that."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = "127.0.0.1"
MANIFEST = """
version: 1
devices: 2
calls:
  - {op: rms_norm, arguments: ["x=4x64:f32"]}
  - {op: linear, arguments: ["x=8x64:f32", "weight=32x64:f32"]}
"""


@pytest.fixture
def address(ray: Any) -> Iterator[str]:
    """A cluster of one node and two logical GPUs, which listens on this machine alone."""
    with socket.socket() as free:
        free.bind((HERE, 0))
        port = free.getsockname()[1]
    # In a folder of its own: else every ray.init of this machine would join it.
    folder = tempfile.mkdtemp(prefix="lz")
    start = f"start --head --block --node-ip-address={HERE} --port={port} --num-cpus=2 --num-gpus=2"
    more = ["--include-dashboard=false", f"--temp-dir={folder}"]
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *start.split(), *more],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            assert head.poll() is None, "ray start has failed"
            with socket.socket() as probe:
                if probe.connect_ex((HERE, port)) == 0:
                    break
            time.sleep(0.2)
        yield f"{HERE}:{port}"
    finally:
        head.terminate()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
def test_the_devices_of_a_cluster_are_compared(address: str, tmp_path: Path) -> None:
    """Exit status 0 where all agree; 1, with the check by name, where the manifest promises otherwise."""
    path = tmp_path / "deployment.yaml"

    def asked(text: str) -> tuple[int, dict[str, Any]]:
        path.write_text(text)
        command = [sys.executable, "-m", "layerzero", "consistency", "--json", "--cluster", address]
        done = subprocess.run(
            [*command, "--manifest", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    status, report = asked(MANIFEST)
    assert (status, report["ok"]) == (0, True), json.dumps(report["findings"], indent=1)
    assert sorted(device["name"] for device in report["devices"]) == ["gpu-0", "gpu-1"]
    assert report["compared"]["calls"] == 2
    status, report = asked(MANIFEST + "versions: {torch: '0.0'}\n")
    assert (status, [finding["check"] for finding in report["findings"]]) == (1, ["versions"])
