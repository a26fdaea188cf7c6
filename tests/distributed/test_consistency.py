"""`lz consistency --cluster`: two devices behind one address, asked by a process that joins for that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MANIFEST = """
version: 1
devices: 2
calls:
  - {op: rms_norm, arguments: ["x=4x64:f32"]}
  - {op: linear, arguments: ["x=8x64:f32", "weight=32x64:f32"]}
"""


@pytest.mark.ray
def test_the_devices_of_a_cluster_are_compared(ray_head: str, tmp_path: Path) -> None:
    """Exit status 0 where all agree; 1, with the check by name, where the manifest promises otherwise."""
    path = tmp_path / "deployment.yaml"

    def asked(text: str) -> tuple[int, dict[str, Any]]:
        path.write_text(text)
        command = [sys.executable, "-m", "layerzero", "consistency", "--json", "--cluster", ray_head]
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


@pytest.mark.ray
@pytest.mark.parametrize(
    ("listens", "said"), [(False, "refused"), (True, "no authentication token was found")]
)
def test_a_cluster_that_cannot_be_joined_is_said_at_once(
    listens: bool, said: str, ray: Any, tmp_path: Path
) -> None:
    """Exit status 2: nobody listens, where Ray itself would knock for minutes, or there is no token."""
    path = tmp_path / "deployment.yaml"
    path.write_text(MANIFEST)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env |= {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "layerzero", "consistency", "--cluster", address, "--manifest", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env=env,
        )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"cluster='{address}' cannot be joined" in done.stderr and said in done.stderr
