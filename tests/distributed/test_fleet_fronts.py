"""Several fronts before one fleet: the process that routes is killed under their streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

from tests.examples.test_server_fronts import (  # noqa: E402
    MANY,
    engine_of,
    numbers,
    streams,
    told,
    wait_for_fronts,
    wait_until_gone,
)
from tests.examples.test_server_split import served  # noqa: E402
from tests.waiting import LIMIT_S  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_streams_of_all_fronts_reach_the_replicas_and_go_on_behind_the_next_router(
    ray_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has its text, also where the process that routes is killed; any front tells of all."""
    monkeypatch.setenv("LAYERZERO_PLACEMENT_TIMEOUT_S", str(LIMIT_S))
    # By its address: the server is a process of its own, and this machine may have other clusters.
    with served("--cluster", ray_head, "--replicas", "2", "--fronts", "2") as server:
        wait_for_fronts(server)
        alone = asyncio.run(streams(server, 4, max_tokens=100))
        assert len(set(alone)) == 4 and "" not in alone
        texts = asyncio.run(
            streams(server, MANY, lambda: os.kill(engine_of(server), signal.SIGKILL), max_tokens=100)
        )
        assert texts == alone * (MANY // 4)
        for answer in told(server, "/health"):
            said = answer.json()
            assert (said["fronts"], said["engine_restarts"], said["front_restarts"]) == (2, 1, 0)
            assert [each["state"] for each in said["replicas"].values()] == ["running", "running"]
        assert numbers(server, "replicas") == {2} and numbers(server, "requests_in_flight") == {0}
        assert numbers(server, "generated_tokens_total") == {(4 + MANY) * 100}

        children = server.children()
        engine = engine_of(server)

        def stop() -> None:  # as a service manager does to all processes of a group
            os.kill(engine, signal.SIGTERM)
            server.process.terminate()

        texts = asyncio.run(streams(server, 4, stop, max_tokens=100))
        assert texts == alone
        assert server.process.wait(LIMIT_S) == 0
        wait_until_gone(children)
