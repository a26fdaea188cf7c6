"""The generation server under Ray Serve, with a Ray of its own: a chat, a stream, and a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import forked

pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray-serve]'")
WHY = "Ray Serve is not installed whole: pip install 'layerzero-runtime[ray-serve]'"
pytest.importorskip("fastapi", reason=WHY)
pytest.importorskip("aiohttp", reason=WHY)
pytest.importorskip("ray.serve", reason=WHY, exc_type=ImportError)
pytest.importorskip("starlette", reason="the server needs starlette: pip install 'layerzero-runtime[serve]'")

# Marked for the time that Ray Serve takes to start and to end: it has a controller, a proxy and a replica.
pytestmark = [pytest.mark.ray, pytest.mark.long]

PROGRAM = """
import json, socket, sys
sys.path[:0] = [sys.argv[1]]
import httpx, ray
from ray import serve
from server.ray_serve import deployment
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(deployment(pages=64), route_prefix="/")
url = f"http://127.0.0.1:{port}"
messages = [{"role": "user", "content": "In the beginning"}]
chat = {"model": "generate", "messages": messages, "max_tokens": 8, "seed": 1}
answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=120)
with httpx.stream("POST", f"{url}/v1/chat/completions", json={**chat, "stream": True}, timeout=120) as stream:
    events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
unknown = httpx.post(f"{url}/v1/chat/completions", json={**chat, "moon": 1}, timeout=120)
print("said", json.dumps({
    "status": answer.status_code, "whole": answer.json()["choices"][0]["message"]["content"],
    "streamed": "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]),
    "last": events[-1], "unknown": [unknown.status_code, unknown.json()["error"]["param"]],
}))
serve.shutdown()
ray.shutdown()
"""


def test_a_chat_goes_through_ray_serve(tmp_path: Path) -> None:
    """The same text whole and streamed, and an unknown field is refused by name, as under uvicorn."""
    script = tmp_path / "serving.py"
    script.write_text(PROGRAM)
    done = forked.run([str(script), str(forked.ROOT / "examples")], tmp_path, 200)
    assert done.returncode == 0, done
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("said ")]
    said = json.loads(line[5:])
    assert said["status"] == 200 and said["whole"] and said["whole"] == said["streamed"]
    assert said["last"] == "[DONE]" and said["unknown"] == [400, "moon"]
