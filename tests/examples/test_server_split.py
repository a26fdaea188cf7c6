"""The server whose tokens are drawn in a process of their own: real processes, sockets and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import engine_process  # noqa: E402
from server.pipe import Pipe, Start, Stop, ToEngine  # noqa: E402
from server.protocol import Sampling  # noqa: E402

from tests import forks  # noqa: E402
from tests.examples import loopback  # noqa: E402
from tests.examples.scripts import Script  # noqa: E402
from tests.examples.serving import PROMPT, asked  # noqa: E402


class Served:
    """A server in a process: its address, and the process of its engine."""

    def __init__(self, process: Script, port: int) -> None:
        self.process = process
        self.http = loopback.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S)

    def text(self, **changes: Any) -> Any:
        """What a request that does not stream is answered, without what differs each time."""
        path = "/v1/chat/completions" if "messages" in changes else "/v1/completions"
        response = self.http.post(path, json=changes)
        answer = json.loads(response.text, parse_float=lambda number: round(float(number), 3))
        return response.status_code, {
            name: value for name, value in answer.items() if name not in ("id", "created")
        }

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics that have no label."""
        lines = self.http.get("/metrics").text.splitlines()
        return {
            line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#" and "{" not in line
        }

    def children(self) -> list[int]:
        """The processes of the server beside its first, in the order in which they were started."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [int(pid) for thread in threads for pid in _read(thread).split()]
        found = []
        for pid in children:
            name, words = (_read(Path(f"/proc/{pid}/{of}")) for of in ("comm", "cmdline"))
            if words and name.strip() != forks.NAME and b"resource_tracker" not in words:
                found.append(pid)
        return sorted(found)

    def engine(self) -> int:
        """The process that draws tokens: the child that runs the model."""
        (engine,) = self.children()
        return engine

    def wait(self, condition: Any, what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until, what
            assert self.process.poll() is None, self.process.said
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Whether /ready says so."""
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    """examples/serve.py in a process, ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Served(Script("serve.py", "--port", str(port), "--pages", "256", *flags), port)
    try:
        server.wait(server.is_ready, "the server did not become ready")
        yield server
    finally:
        server.http.close()
        server.process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with an engine in a process of its own."""
    with served("--engine-process") as running:
        yield running


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """Another one, with few pages and no room to wait for them."""
    with served("--engine-process", "--max-waiting-tokens", "1", "--pages", "8") as running:
        yield running


REQUESTS = [
    asked(),
    asked(temperature=0, max_tokens=40, stop=["the"]),
    asked(n=3, logprobs=2, max_tokens=6),
    asked(prompt=[17, 4, 9], logit_bias={"5": 20}, repetition_penalty=1.2, min_p=0.05),
    asked(structured_outputs={"regex": "[a-f]{4}"}),
    asked(structured_outputs={"json": {"type": "string", "pattern": "^(a+)+$", "minLength": 3000}}),
    asked(max_tokens=5000),
    {"model": "generate", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "seed": 5,
     "logprobs": True, "top_logprobs": 1},
]  # fmt: skip


def test_both_ways_give_the_same_answers(server: Served) -> None:
    """Every field of a request has its effect across the processes, and errors have their words."""
    with served("--no-engine-process") as alone:
        for request in REQUESTS:
            assert server.text(**request) == alone.text(**request)
        assert server.text(**asked())[0] == 200
        assert [server.text(**request)[0] for request in REQUESTS[4:7]] == [200, 400, 400]


def test_streams_meet_in_batches(server: Served) -> None:
    """Requests of many clients reach the engine's batches, each with its own text."""

    async def everything() -> list[str]:
        async with loopback.AsyncClient(base_url=server.http.base_url, timeout=LIMIT_S) as http:

            async def one(seed: int) -> str:
                body = asked(seed=seed % 8, max_tokens=24)
                return str((await http.post("/v1/completions", json=body)).json()["choices"][0]["text"])

            return await asyncio.gather(*(one(seed) for seed in range(32)))

    texts = asyncio.run(everything())
    assert texts == texts[:8] * 4 and len(set(texts)) == 8
    assert server.metrics()["generated_tokens_total"] >= 32 * 24


def test_metrics_have_both_processes_once(server: Served) -> None:
    """What the front counts and what the engine counts, no name twice."""
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("# TYPE")]
    assert len(lines) == len(set(lines))
    names = {line.split()[2] for line in lines}
    assert {"requests_total", "kv_pages_free", "engine_restarts_total", "engine_serves"} <= names
    assert any(name.startswith("layerzero_") for name in names)
    health = server.http.get("/health").json()
    assert health["status"] == "ok" and health["pages"] == 256


def test_a_client_that_goes_takes_its_request_with_it(server: Served) -> None:
    """The engine draws no token for nobody, and its pages come back."""
    total = server.http.get("/health").json()["pages"]
    before, engine = _batches(server), server.engine()
    body = asked(max_tokens=1000, ignore_eos=True, n=3, stream=True)
    with server.http.stream("POST", "/v1/completions", json=body) as events:
        assert events.status_code == 200
        next(events.iter_lines())
        os.kill(engine, signal.SIGSTOP)  # that the answer does not end before its client goes
    server.wait(lambda: server.metrics()["requests_in_flight"] == 0, "the front still holds the request")
    os.kill(engine, signal.SIGCONT)
    server.wait(
        lambda: server.http.get("/health").json().get("pages_free") == total,
        "the engine still holds the pages",
    )
    assert 0 < _batches(server) - before < 900


def _batches(server: Served) -> float:
    """How many batches the engine has launched."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith("layerzero_batcher_batches_total{")
    )


def _read(path: Path) -> bytes:
    """A file of a process or thread; nothing where that has ended meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _stream(server: Served, kills: int, **changes: Any) -> list[dict[str, Any]]:
    """The events of a stream, under which the engine is killed so many times."""
    events: list[Any] = []
    killed: list[int] = []
    with server.http.stream("POST", "/v1/completions", json=asked(stream=True, **changes)) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                # Once more only when another process serves: then the stream is there.
                wanted = len(events) >= 3 and len(killed) < kills
                if wanted and set(engine := server.children()) - set(killed) and server.is_ready():
                    os.kill(engine[0], signal.SIGKILL)
                    killed += engine
    return events


def test_a_stream_goes_on_in_the_next_process(server: Served) -> None:
    """The engine is killed under it: the same text comes, and the restart is counted."""
    whole = server.text(**asked(max_tokens=400))[1]["choices"][0]["text"]
    before = server.metrics()["engine_restarts_total"]
    events = _stream(server, 1, max_tokens=400)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert server.metrics()["engine_restarts_total"] == before + 1


def test_a_request_that_was_there_at_two_deaths_gets_an_error(server: Served) -> None:
    """It may be what ends the process; others are served by the next one."""
    events = _stream(server, 2, max_tokens=1200)
    assert events[-1]["error"]["code"] == "DEVICE_LOST", events[-1]
    server.wait(server.is_ready, "no other process came")
    assert server.text(**asked())[0] == 200


def test_a_full_queue_is_429(small: Served) -> None:
    """The engine's refusal has the status and the seconds that it has in one process."""

    async def both() -> list[httpx.Response]:
        async with loopback.AsyncClient(base_url=small.http.base_url, timeout=LIMIT_S) as http:
            body = asked(max_tokens=100)
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(16)))

    refused = [response for response in asyncio.run(both()) if response.status_code != 200]
    assert refused and all(response.status_code == 429 for response in refused)
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)


# The last one of both servers.
@pytest.mark.parametrize(("which", "number", "status"), [("server", "TERM", 0), ("small", "KILL", -9)])
def test_both_processes_end(request: pytest.FixtureRequest, which: str, number: str, status: int) -> None:
    """By a drain, or when the front is killed: no engine is left behind."""
    server: Served = request.getfixturevalue(which)
    engine = server.engine()
    server.process.send_signal(signal.Signals[f"SIG{number}"])
    assert server.process.wait(LIMIT_S) == status
    until = time.monotonic() + LIMIT_S
    while Path(f"/proc/{engine}").exists() and not _is_zombie(engine):
        assert time.monotonic() < until, "the engine goes on without its front"
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    stat = _read(Path(f"/proc/{pid}/stat"))
    return not stat or stat.rpartition(b")")[2].split()[0] == b"Z"


@pytest.mark.asyncio
async def test_what_one_turn_sends_is_one_write() -> None:
    """However many messages there are, and the other end gets them in order, wherever frames are cut."""
    received: list[Any] = []
    lost = asyncio.Event()
    pipe = Pipe(ToEngine, received.append, lost.set)
    writes: list[bytes] = []

    class Transport(asyncio.Transport):
        def write(self, data: Any) -> None:
            writes.append(bytes(data))

        def is_closing(self) -> bool:
            return False

    pipe.connection_made(Transport())
    for number in range(100):
        pipe.send(Stop(number))
    await asyncio.sleep(0)
    pipe.send(Stop(100))
    await asyncio.sleep(0)
    assert len(writes) == 2
    stream = b"".join(writes)
    for byte in stream:
        pipe.data_received(bytes([byte]))
    assert received == [Stop(number) for number in range(101)]
    received.clear()
    pipe.data_received(stream)
    assert received == [Stop(number) for number in range(101)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "ends"),
    [("CUDA error: an illegal memory access was encountered", True), ("ids need to be below 32", False)],
)
async def test_a_device_fault_ends_the_engine(monkeypatch: pytest.MonkeyPatch, text: str, ends: bool) -> None:
    """No later request could be served there; another error leaves the process in service."""

    class Failing:
        engine = property(lambda self: self)

        async def grammar(self, constraint: Any) -> None:
            return None

        async def forward(self, *args: Any) -> None:
            raise RuntimeError(text)

    class Ended(BaseException):
        """What stands for the end of the process."""

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    server: Any = engine_process._Server(Failing())  # type: ignore[arg-type]
    sent: list[Any] = []
    server.pipe = type("Sink", (), {"send": staticmethod(sent.append)})
    start = Start(0, [1], Sampling(seed=1), 4, "", None, False, False, [])
    if ends:
        with pytest.raises(Ended, match="70"):
            await server._draw(start)
    else:
        await server._draw(start)
        assert sent[0].error == ("RuntimeError", text, 0.0)
