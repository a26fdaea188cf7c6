"""The conformance suite once more while Ray loses requests and answers: same assertions, same errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import forked

CONFORMANCE = str(Path(__file__).with_name("test_conformance.py"))
# A quarter of all calls of actors are lost on the way there, a quarter of the answers on the way back.
CHAOS = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": -1,
        "req_failure_prob": 25,
        "resp_failure_prob": 25,
        "in_flight_failure_prob": 0,
    }
}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_conformance_while_messages_are_lost(ray_head: str, tmp_path: Path) -> None:
    """Nothing lost, nothing doubled, no other error: executions equal distinct requests.

    The process that calls loses them, on its way to a node that other tests use too.
    """
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CONFORMANCE]
    given = {"LZ_TEST_PORTS": "ray", "LZ_TEST_HEAD": ray_head, "RAY_testing_rpc_failure": json.dumps(CHAOS)}
    ended = forked.run(command, tmp_path, 400, given)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
