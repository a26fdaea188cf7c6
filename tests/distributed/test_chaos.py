"""The conformance suite once more while Ray loses requests and answers: same assertions, same errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A quarter of all calls of actors are lost on the way there, a quarter of the answers on the way back.
CHAOS = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": -1,
        "req_failure_prob": 25,
        "resp_failure_prob": 25,
        "in_flight_failure_prob": 0,
    }
}


def conformance(ray: Any, **chaos: Any) -> str:
    env = {**os.environ, "LZ_TEST_PORTS": "ray", **chaos}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/distributed/test_conformance.py"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.ray
@pytest.mark.timeout(420)
def test_conformance_while_messages_are_lost(ray: Any) -> None:
    """Nothing lost, nothing doubled, no other error: executions equal distinct requests."""
    printed = conformance(ray, RAY_testing_rpc_failure=json.dumps(CHAOS))
    assert " passed" in printed
    assert "skipped" not in printed
