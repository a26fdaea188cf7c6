"""The generation server with a replica on another host: each client gets its answer, or an error in time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosting.namespaces import Hosts, why_not
from tests.distributed import forked

pytestmark = pytest.mark.ray


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_of_a_replica_behind_a_cut_go_on_at_another_one_or_end_with_an_error() -> None:
    """Whole texts, no token twice, over a cut and half-open lines; a slow line moves nothing.

    Where requests that move begin anew, the same trial shows tokens twice.
    """
    pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    pytest.importorskip("tests.distributed.test_server_fleet")
    if why := why_not():
        pytest.skip(why)
    path = os.pathsep.join((str(forked.ROOT), os.environ.get("PYTHONPATH", "")))
    given = {"PYTHONPATH": path, "RAY_health_check_failure_threshold": "20"}
    with Hosts(given, first_gpus=1, second_gpus=1) as hosts:
        program = [sys.executable, str(Path(__file__).with_name("cut_server.py"))]
        done = hosts.run(hosts.first, [*program, hosts.address, hosts.cable], 500.0)
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert found, done.stdout[-6000:]
    said: dict[str, Any] = found[0]
    for name in ("towards the replica", "towards the server"):
        assert said[name]["texts"] == said["whole"], name
        assert said[name]["moved"] and said[name]["statuses"] == [200, 200, 200], (name, said[name])
    forgetful = said["without the guard"]  # what the lines above are able to see
    assert forgetful["moved"] and forgetful["texts"] != said["whole"], forgetful

    assert said["delay"] == {"texts": said["whole"], "moved": 0}
    nobody = said["nobody"]
    assert nobody["status"] == 503 and nobody["codes"] == ["DEVICE_LOST", "DEVICE_LOST"]
    assert nobody["left"] == [0, 0] and nobody["seconds"] < 120.0, nobody
