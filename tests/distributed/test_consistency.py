"""`lz consistency --cluster`: two devices behind one address, asked by a process that joins for that."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import forked

MANIFEST = """
version: 1
devices: 2
calls:
  - {op: rms_norm, arguments: ["x=4x64:f32"]}
  - {op: linear, arguments: ["x=8x64:f32", "weight=32x64:f32"]}
versions: {torch: '0.0'}
"""


@pytest.mark.ray
def test_the_devices_of_a_cluster_are_compared(ray_head: str, tmp_path: Path) -> None:
    """They agree; what the manifest promises otherwise is the one finding, and exit status 1."""
    path = tmp_path / "deployment.yaml"
    path.write_text(MANIFEST)
    command = ["-m", "layerzero", "consistency", "--json", "--cluster", ray_head, "--deployment", str(path)]
    done = forked.run(command, tmp_path, 100)
    assert done.stdout.startswith("{"), done
    report = json.loads(done.stdout)
    assert sorted(device["name"] for device in report["devices"]) == ["gpu-0", "gpu-1"]
    assert report["compared"]["calls"] == 2
    findings = report["findings"]
    assert [finding["check"] for finding in findings] == ["versions"], json.dumps(findings, indent=1)
    assert (done.returncode, report["ok"]) == (1, False)


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
    without = {name: None for name in os.environ if name.startswith("RAY_AUTH")}
    given = {**without, "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ["-m", "layerzero", "consistency", "--cluster", address, "--deployment", str(path)]
        done = forked.run(command, tmp_path, 90, given)
    assert done.returncode == 2, done
    assert f"cluster='{address}' cannot be joined" in done.stderr and said in done.stderr
