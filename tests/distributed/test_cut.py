"""Two hosts and a cable that is cut: a call that is not idempotent runs on one of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.hosting.namespaces import Hosts, why_not
from tests.distributed import forked
from tests.distributed.cut import CALLS

pytestmark = pytest.mark.ray


@pytest.mark.timeout(300)
def test_calls_that_a_cut_off_host_has_not_begun_run_elsewhere_alone(tmp_path: Path) -> None:
    """They lay there when the cable was cut; their caller sends them to another host, and they run there."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    if why := why_not():
        pytest.skip(why)
    executed = tmp_path / "executed"
    given = {
        "PYTHONPATH": os.pathsep.join((str(forked.ROOT), os.environ.get("PYTHONPATH", ""))),
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "500",
        "RAY_health_check_failure_threshold": "6",
    }
    with Hosts(given) as hosts:
        program = [sys.executable, str(Path(__file__).with_name("cut.py")), hosts.address, hosts.cable]
        done = hosts.run(hosts.first, [*program, str(executed)], 200.0)
    (said,) = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SAID ")] or [
        done
    ]
    assert said["answered"] == list(range(CALLS)), done.stdout[-3000:]
    assert said["lost"] == [False] * CALLS + [True]
    assert sorted(map(int, executed.read_text().split())) == list(range(CALLS))
