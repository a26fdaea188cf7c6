"""Requests that mean the server no good: each is answered, or ends alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import app as server_app  # noqa: E402  the skips come first
from server.fields import BadRequest  # noqa: E402
from server.protocol import read  # noqa: E402

from tests.examples import loopback  # noqa: E402
from tests.examples.scripts import EXAMPLES, wait_until_healthy  # noqa: E402
from tests.examples.serving import NOTHING, Running, asked, serving  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that takes bodies of a mebibyte."""
    with serving(server_app.Options(pages=64, max_body=1 << 20)) as running:
        yield running


HOSTILE = {
    "nested beyond the parser": (b"[" * 100_000, None),
    "nested in a field": (b'{"model":"generate","prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", None),
    "half a character in the prompt": (b'{"model":"generate","prompt":"\\ud800"}', "prompt"),
    "half a character in a stop string": (b'{"model":"generate","prompt":"a","stop":"\\udc00"}', "stop"),
    "half a character in a name": (b'{"model":"generate","prompt":"a","\\ud800":2}', "\\ud800"),
    "a number beyond floats": (
        b'{"model":"generate","prompt":"a","temperature":1' + b"0" * 400 + b"}",
        "temperature",
    ),
    "no UTF-8": (b'{"model":"generate","prompt":"\xff"}', None),
    "options that are a list": (
        b'{"model":"generate","prompt":"a","stream":true,"stream_options":[]}',
        "stream_options",
    ),
    "an option that is no boolean": (
        b'{"model":"generate","prompt":"a","stream":true,"stream_options":{"include_usage":"no"}}',
        "stream_options",
    ),
    "an unknown option": (
        b'{"model":"generate","prompt":"a","stream":true,"stream_options":{"every":2}}',
        "stream_options",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_cannot_be_meant_is_refused(server: Running, name: str) -> None:
    """It is 400 with an error in the words of the API, which names the field if there is one."""
    body, param = HOSTILE[name]
    with pytest.raises(BadRequest):
        read(body, "generate")
    given = loopback.post(f"{server.url}/v1/completions", content=body)
    assert given.status_code == 400, given.text
    assert given.json()["error"]["param"] == param
    assert server.settled() == NOTHING


def test_a_body_beyond_the_limit_is_413(server: Running) -> None:
    """Whether its length was told beforehand or not; one below the limit is read."""
    url = f"{server.url}/v1/completions"
    body = json.dumps(asked(prompt="word " * (1 << 18))).encode()

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    for content in (body, pieces()):
        given = loopback.post(url, content=content)
        assert given.status_code == 413
        assert "1048576" in given.json()["error"]["message"]
    below = loopback.post(url, json=asked(prompt="word " * (1 << 17)))
    assert (below.status_code, below.json()["error"]["param"]) == (400, "prompt")


def test_a_long_prompt_is_not_tokenized_on_the_loop(server: Running, monkeypatch: Any) -> None:
    """While one is encoded the loop answers others; one that cannot fit is refused by its length."""
    held: list[bool] = []
    codec = server.service.tokenizer.codec
    encode = codec.encode

    def watched(*arguments: Any) -> Any:
        held.append(threading.get_ident() == loops)
        return encode(*arguments)

    loops = server.inside(threading.get_ident)
    monkeypatch.setattr(codec, "encode", watched)
    most = server.service.max_prompt_characters
    for characters in (most - most % 5, most + 1):
        prompt = ("word " * characters)[:characters]
        given = loopback.post(f"{server.url}/v1/completions", json=asked(prompt=prompt))
        assert given.status_code == 400
    assert held == [False]


def test_a_client_that_leaves_before_its_body_is_no_error(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a body and a closed socket: nothing is logged as an error, nothing stays."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as opened:
        opened.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"a"')
        time.sleep(0.2)
    assert loopback.get(f"{server.url}/health").status_code == 200
    assert server.settled() == NOTHING
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_an_error_of_the_server_is_said_in_the_words_of_the_api(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 with an error object that tells nothing of the inside, streamed or not; the next one is served."""

    async def broken(*args: Any) -> Any:
        raise RuntimeError("a secret of the inside")

    for stream in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(server.service.model, "sample_next", broken)
            given = loopback.post(f"{server.url}/v1/completions", json=asked(stream=stream))
        assert given.status_code == 500
        assert given.headers["connection"] == "close"  # as it is: who reuses it gets no answer
        assert given.json()["error"]["type"] == "server_error"
        assert "secret" not in given.text
        assert server.settled() == NOTHING
    assert loopback.post(f"{server.url}/v1/completions", json=asked()).status_code == 200


def test_an_event_is_one_line_for_every_reader(server: Running) -> None:
    """Characters that some readers of lines take for an end of line are escaped."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    text = "a\u2028b\u0085c\u2029\n\x0b\U0001f600"
    completion = server_app.Answer(server.service, read(json.dumps(asked()).encode(), "generate"))
    asyncio.run(completion._event(send, {"text": text}))
    lines = b"".join(sent).decode().splitlines()
    assert len(lines) == 2 and not lines[1]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}


def test_sigterm_ends_what_does_not_end_in_time(tmp_path: Path) -> None:
    """Sixteen streams that would run far beyond `--drain-s`: the server leaves soon after it, with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(EXAMPLES / "serve.py")
    command = [sys.executable, script, "--port", str(port), "--pages", "4096", "--drain-s", "1"]
    printed = tmp_path / "printed"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with printed.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        cut = asyncio.run(_cut_short(url, process, 16))
        assert cut == 16
        assert process.wait(60) == 0, printed.read_text()
    finally:
        process.kill()
        process.wait()


async def _cut_short(url: str, process: subprocess.Popen[bytes], count: int) -> int:
    """Streams that began and did not come to their end after the server was told to go."""
    begun, told = 0, asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> bool:
        nonlocal begun
        last = ""
        request = asked(max_tokens=3900, seed=number, stream=True)
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
                async for line in response.aiter_lines():
                    if line and not last:
                        begun += 1
                        if begun == count:
                            process.send_signal(signal.SIGTERM)
                            told.set()
                    last = line or last
        except httpx.HTTPError:
            return told.is_set()
        return told.is_set() and last != "data: [DONE]"

    async with loopback.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=count)) as client:
        return sum(await asyncio.gather(*(one(client, number) for number in range(count))))
