"""The server with several fronts on one port: real processes that are killed, drained and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import app, processes  # noqa: E402
from server.counts import Counts  # noqa: E402
from server.front import Options  # noqa: E402

from tests.examples import loopback  # noqa: E402
from tests.examples.serving import asked  # noqa: E402
from tests.examples.test_server_split import Served, _is_zombie, served  # noqa: E402

MANY = 16  # connections, of which each front has some


def fronts_of(server: Served) -> set[int]:
    """The processes that listen on the server's port."""
    port = f"{server.http.base_url.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A" and line[1].endswith(":" + port)}

    def listens(pid: int) -> bool:
        try:
            return any(_link(file) in listening for file in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # it has ended meanwhile
            return False

    return {pid for pid in server.children() if listens(pid)}


def _link(file: Path) -> str:
    """What an open file of a running process is; nothing where it was closed meanwhile."""
    try:
        return os.readlink(file)
    except OSError:
        return ""


def engine_of(server: Served) -> int:
    """The process that draws."""
    (engine,) = set(server.children()) - fronts_of(server)
    return engine


def wait_for_fronts(server: Served) -> None:
    server.wait(lambda: len(fronts_of(server)) == 2, "not both fronts came up")
    server.wait(server.is_ready, "the server is not ready")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with two fronts over one engine."""
    with served("--fronts", "2") as running:
        wait_for_fronts(running)
        yield running


async def streams(server: Served, count: int, begun: Any = None, **changes: Any) -> list[str]:
    """The texts of so many streams at once, a connection each; `begun` is called when all have begun."""
    first: set[int] = set()

    async def one(seed: int) -> str:
        async with loopback.AsyncClient(base_url=server.http.base_url, timeout=LIMIT_S) as http:
            text, whole = "", False
            body = asked(seed=seed % 4, stream=True, ignore_eos=True, **changes)
            try:
                async with http.stream("POST", "/v1/completions", json=body) as lines:
                    assert lines.status_code == 200
                    async for line in lines.aiter_lines():
                        whole = whole or line == "data: [DONE]"
                        if line.startswith('data: {"id"'):  # no error
                            text += json.loads(line[6:])["choices"][0]["text"]
                            first.add(seed)
                            if len(first) == count and begun is not None:
                                begun()
                                first.add(-1)
            except httpx.TransportError:
                return ""
            return text if whole else ""

    return list(await asyncio.gather(*map(one, range(count))))


def told(server: Served, path: str) -> list[httpx.Response]:
    """What a path answers to many connections of their own."""
    answers = []
    for _ in range(MANY):
        with loopback.Client(base_url=server.http.base_url, timeout=LIMIT_S) as http:
            answers.append(http.get(path))
    return answers


def numbers(server: Served, name: str) -> set[float]:
    """What the fronts say that a sample of /metrics is."""
    lines = [line for answer in told(server, "/metrics") for line in answer.text.splitlines()]
    return {float(line.split()[-1]) for line in lines if line.startswith(name + " ")}


def test_fronts_share_a_port_and_each_tells_of_all(server: Served) -> None:
    """Streams on connections of their own have their texts; counts and states are those of all fronts."""
    (before,) = numbers(server, "generated_tokens_total")
    texts = asyncio.run(streams(server, MANY, max_tokens=24))
    assert texts == texts[:4] * (MANY // 4) and len(set(texts)) == 4
    assert numbers(server, "generated_tokens_total") == {before + MANY * 24}
    assert numbers(server, "requests_in_flight") == {0}
    assert {answer.json()["fronts"] for answer in told(server, "/health")} == {2}
    assert {answer.json()["pages"] for answer in told(server, "/health")} == {256}
    lines = [line for line in told(server, "/metrics")[0].text.splitlines() if line.startswith("# TYPE")]
    assert len(lines) == len(set(lines))


def test_a_killed_front_costs_its_own_connections(server: Served) -> None:
    """The streams of the other one have their whole texts; what it had is given back, and it comes again."""
    alone = asyncio.run(streams(server, 4, max_tokens=150))
    victim = min(fronts_of(server))
    (restarts,) = numbers(server, "front_restarts_total")
    texts = asyncio.run(streams(server, MANY, lambda: os.kill(victim, signal.SIGKILL), max_tokens=150))
    cut = [text for text in texts if not text]
    assert cut and len(cut) < MANY, "every stream was at one front"
    assert all(text in ("", alone[seed % 4]) for seed, text in enumerate(texts))
    wait_for_fronts(server)
    assert victim not in fronts_of(server)
    server.wait(
        lambda: numbers(server, "requests_in_flight") == {0}, "requests of the dead front are counted"
    )
    assert numbers(server, "front_restarts_total") == {restarts + 1}
    total = told(server, "/health")[0].json()["pages"]
    server.wait(
        lambda: {answer.json().get("pages_free") for answer in told(server, "/health")} == {total},
        "the engine draws for a front that is gone",
    )


def test_streams_of_every_front_go_on_in_the_next_engine(server: Served) -> None:
    """The engine is killed under them: each gets the text that it gets without."""
    alone = asyncio.run(streams(server, 4, max_tokens=200))
    (restarts,) = numbers(server, "engine_restarts_total")
    engine = engine_of(server)
    assert asyncio.run(
        streams(server, MANY, lambda: os.kill(engine, signal.SIGKILL), max_tokens=200)
    ) == alone * (MANY // 4)
    assert numbers(server, "engine_restarts_total") == {restarts + 1}


# The last one of this server.
def test_sigterm_drains_every_front(server: Served) -> None:
    """What has begun ends whole, then every process has ended, and the status is 0."""
    alone = asyncio.run(streams(server, 4, max_tokens=60))
    children = server.children()
    assert len(children) == 3
    texts = asyncio.run(streams(server, 8, lambda: server.process.send_signal(signal.SIGTERM), max_tokens=60))
    assert texts == alone * 2
    assert server.process.wait(LIMIT_S) == 0
    wait_until_gone(children)


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
        assert time.monotonic() < until, "a process goes on without its server"
        time.sleep(0.05)


def test_limits_hold_over_all_fronts_and_no_process_outlives_the_first() -> None:
    """Of two fronts with three places none takes a fourth request; SIGKILL of the first process ends all."""
    with served("--fronts", "2", "--max-requests", "3") as server:
        wait_for_fronts(server)
        refused: list[int] = []

        def more() -> None:
            for _ in range(MANY):
                with loopback.Client(base_url=server.http.base_url, timeout=LIMIT_S) as http:
                    refused.append(http.post("/v1/completions", json=asked()).status_code)
            server.process.kill()

        children = server.children()
        asyncio.run(streams(server, 3, more, max_tokens=1200))
        assert refused == [429] * MANY
        server.process.wait(LIMIT_S)
        wait_until_gone(children)


def test_a_server_whose_model_is_missing_ends(tmp_path: Path) -> None:
    """It is not started again and again: the status says that it did not start."""
    options = Options(model=tmp_path / "none", fronts=1, port=0)
    assert processes.serve(options, app.run_front) == 3


@pytest.mark.parametrize(
    "flags", [("0",), ("65",), ("some",), ("2", "--no-engine-process")], ids=lambda flags: " ".join(flags)
)
def test_numbers_of_fronts_that_cannot_be_are_refused_by_name(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the flag."""
    with pytest.raises(SystemExit):
        app.parse(["--fronts", *flags])
    assert "--fronts" in capsys.readouterr().err


def test_how_many_fronts_there_are() -> None:
    """One, but for a fleet on CUDA: as many as replicas, at most four."""
    assert [Options(device=device).front_count for device in ("cpu", "cuda")] == [1, 1]
    assert Options(cluster="auto", replicas=8).front_count == 1
    for replicas, fronts in ((1, 1), (2, 2), (8, 4), (None, 4)):
        assert Options(device="cuda", cluster="auto", replicas=replicas).front_count == fronts
    assert Options(device="cuda", cluster="auto", replicas=8, fronts=6).front_count == 6
    assert app.parse(["--cluster", "auto", "--fronts", "2", "--no-engine-process"]).is_split


def test_an_address_that_another_server_has_is_refused() -> None:
    """Two servers of one user would share it in silence."""
    with processes.reserved(Options(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            processes.reserved(Options(port=port))
        processes.bound("127.0.0.1", port, *app.SHARED).close()


def test_counts_are_those_of_all_rows() -> None:
    """Each row has its writer; what a process had under way goes with it."""
    one, other = (Counts(memory := [0] * 40, 0), Counts(memory, 1))
    one.add("tokens", 3)
    other.add("tokens")
    other.add("active")
    assert one.total("tokens") == other.total("tokens") == 4
    one.clear("active")
    assert one.total("active") == 1
    other.clear("active")
    assert one.total("active") == 0 and one.total("tokens") == 4
