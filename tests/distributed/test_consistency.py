"""`lz consistency --cluster`: two devices behind one address, asked by a process that joins for that."""

from __future__ import annotations

import json
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
