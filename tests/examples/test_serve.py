"""The generation server over a real socket: OpenAI's client, httpx, disconnects, overload, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

import openai  # noqa: E402
from server import app as server_app  # noqa: E402  the skips come first

from tests.examples import loopback  # noqa: E402
from tests.examples.scripts import Script, wait_until_healthy  # noqa: E402
from tests.examples.serving import (  # noqa: E402
    NOTHING,
    Running,
    asked,
    check_texts_in_company,
    client_of,
    serving,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose pool holds 4,096 tokens."""
    with serving(server_app.Options(pages=256)) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with client_of(server) as opened:
        yield opened


def test_models_and_health(server: Running, client: openai.OpenAI) -> None:
    """The one model is listed under its folder's name; health says what is free."""
    assert [model.id for model in client.models.list()] == ["generate"]
    state = loopback.get(f"{server.url}/health")
    assert state.status_code == 200
    assert state.json()["status"] == "ok"
    assert state.json()["pages"] == 256
    ready = loopback.get(f"{server.url}/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    """Text, reason and counts agree; the same seed gives the same text, another one another."""
    whole = client.completions.create(**asked())
    assert whole.object == "text_completion"
    choice = whole.choices[0]
    assert choice.text and choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 7 and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == 19
    events = list(client.completions.create(**asked(), stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage == whole.usage
    pieces = [event.choices[0] for event in events[:-1]]
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"
    assert len({event.id for event in events}) == 1
    assert client.completions.create(**asked(seed=4)).choices[0].text != choice.text


def test_greedy_text_continues_the_prose(client: openai.OpenAI) -> None:
    """Temperature 0 needs no seed, takes token ids as well as text, and gives words of the prose."""
    greedy = asked(temperature=0, seed=None, max_tokens=24)
    text = client.completions.create(**greedy).choices[0].text
    assert text == client.completions.create(**greedy).choices[0].text
    words = {word.strip(",.;:?") for word in text.split()}
    assert len(words & {"the", "unto", "and", "of", "ye", "Ye", "that", "have", "said"}) >= 3, text


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    """Nothing of the stop string is given, in one piece or streamed, and the reason is `stop`."""
    free = client.completions.create(**asked(temperature=0, max_tokens=30)).choices[0].text
    stop = free[len(free) // 2 :][:5]
    wanted = free[: free.index(stop)]
    cut = client.completions.create(**asked(temperature=0, max_tokens=30, stop=[stop, "\x00"])).choices[0]
    assert (cut.text, cut.finish_reason) == (wanted, "stop")
    events = list(client.completions.create(**asked(temperature=0, max_tokens=30, stop=stop), stream=True))
    assert "".join(event.choices[0].text for event in events) == wanted
    assert events[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 9}, "model"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"seed": "one"}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"echo": True}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"beam": 4}, "beam"),
    ],
)
def test_what_cannot_be_honoured_is_named(server: Running, changes: dict[str, Any], param: str) -> None:
    """A field that does not fit gives 400 and its name; nothing is ignored in silence."""
    given = loopback.post(f"{server.url}/v1/completions", json=asked(**changes))
    assert given.status_code == 400, given.text
    assert given.json()["error"]["param"] == param
    assert param in given.json()["error"]["message"]
    assert server.settled() == NOTHING


def test_another_model_is_404(server: Running, client: openai.OpenAI) -> None:
    """With the code that OpenAI gives, for a completion and for the model itself; the served one is known."""
    for ask in (
        lambda: client.completions.create(**asked(model="gpt-9")),
        lambda: client.models.retrieve("gpt-9"),
        lambda: client.models.retrieve("a/b"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert client.models.retrieve("generate") == next(iter(client.models.list()))


def test_a_refusal_is_shorter_than_what_it_refuses(server: Running) -> None:
    """A value of any length is told by its beginning."""
    long = "x" * 500_000
    for changes in ({"logit_bias": {long: 1}}, {"seed": long}, {"model": long}, {"stop": {long: 1}}):
        given = loopback.post(f"{server.url}/v1/completions", json=asked(**changes))
        assert given.status_code in (400, 404)
        assert len(given.content) < 400


def test_other_nonsense_is_refused(server: Running, client: openai.OpenAI) -> None:
    """No JSON is 400, an unknown path 404, another method 405, each an error that the client knows."""
    url = f"{server.url}/v1/completions"
    assert loopback.post(url, content=b"{").status_code == 400
    assert loopback.post(url, content=b"[1]").status_code == 400
    refused = loopback.get(url)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert "error" in loopback.get(f"{server.url}/v1/nothing").json()
    with pytest.raises(openai.BadRequestError, match="temperature needs"):
        client.completions.create(**asked(temperature=9))
    with pytest.raises(openai.BadRequestError, match="messages needs"):
        client.chat.completions.create(model="generate", messages=[])


def test_a_full_queue_answers_429(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that wait are bounded by their tokens; those beyond are refused with Retry-After."""

    async def never(*args: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.service.engine.requests, "max_waiting_tokens", 3000)
    monkeypatch.setattr(server.service.model, "sample_next", never)
    before = server.metrics()
    body = json.dumps(asked(prompt=[5] * 2000, max_tokens=9)).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as held:
        held.sendall(head + body)
        until = time.monotonic() + LIMIT_S
        while server.left()["pages"] < 2000 / 16 and time.monotonic() < until:
            time.sleep(0.01)
        refused = loopback.post(f"{server.url}/v1/completions", json=asked(prompt=[7] * 3500, max_tokens=9))
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert server.settled() == NOTHING
    rejected = ("requests_total", (("outcome", "rejected"),))
    assert server.metrics()[rejected] == before.get(rejected, 0) + 1


def test_too_many_requests_answer_429(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of two requests refuses the third while they run, and takes the next when they have ended."""
    monkeypatch.setattr(server.service, "options", replace(server.service.options, max_requests=2))
    url, long = f"{server.url}/v1/completions", asked(max_tokens=1900, temperature=0, stream=True)
    with (
        loopback.stream("POST", url, json=long) as one,
        loopback.stream("POST", url, json=long) as two,
    ):
        lines = one.iter_lines(), two.iter_lines()  # an iterator that is dropped hangs up
        assert all(next(of) for of in lines)
        third = loopback.post(url, json=asked())
        assert third.status_code == 429
        assert int(third.headers["Retry-After"]) >= 1
        assert third.json()["error"]["type"] == "rate_limit_error"
    assert server.settled() == NOTHING
    assert loopback.post(url, json=asked()).status_code == 200


@pytest.mark.asyncio
async def test_sixteen_streams_meet_and_keep_their_texts(server: Running) -> None:
    """A seed gives the same text alone and among sixteen."""
    await check_texts_in_company(server, 16, 16)


async def _hang_up(server: Running, count: int, seed: int) -> list[int]:
    """The answers to `count` requests, 0 where the client left at a random moment, as most do."""
    chance = random.Random(seed)

    async def one(client: httpx.AsyncClient, number: int) -> int:
        request = asked(seed=number, max_tokens=chance.choice((1, 5, 40)), stream=number % 3 > 0)
        given_up_after = chance.choice((0, 0, 1, 3, 100))
        if not request["stream"]:
            try:
                patience = 0.02 if given_up_after < 3 else 100.0
                done = await client.post("/v1/completions", json=request, timeout=patience)
            except httpx.TimeoutException:
                return 0
            return done.status_code
        async with client.stream("POST", "/v1/completions", json=request, timeout=LIMIT_S) as response:
            lines = 0
            async for line in response.aiter_lines():
                lines += bool(line)
                if lines > given_up_after:
                    return 0
            return response.status_code

    async with loopback.AsyncClient(base_url=server.url) as client:
        return await asyncio.gather(*(one(client, number) for number in range(count)))


@pytest.mark.asyncio
@pytest.mark.parametrize(("count", "seeds"), [(24, [1]), pytest.param(64, range(5), marks=pytest.mark.slow)])
async def test_clients_that_hang_up_leave_nothing_behind(
    server: Running, count: int, seeds: Sequence[int]
) -> None:
    """Pages, callers, calls and tasks are gone with the request, streamed or not; also again and again."""
    for seed in seeds:
        before = server.lanes()
        given = await _hang_up(server, count, seed)
        assert set(given) <= {0, 200}
        assert given.count(0) > count / 4
        assert server.settled() == NOTHING
        stats = server.lanes()
        assert stats.cancelled > before.cancelled
        assert stats.failed == before.failed
        assert stats.submitted == stats.done + stats.failed + stats.cancelled + stats.expired + stats.rejected


def test_metrics_tell_what_the_lane_did(server: Running, client: openai.OpenAI) -> None:
    """Scraped before and after one request, every family moves by what the request did."""
    device = (("device", "cpu"),)
    before = server.metrics()
    assert client.completions.create(**asked(max_tokens=6)).usage
    assert server.settled() == NOTHING
    after = server.metrics()

    def moved(name: str, labels: tuple[tuple[str, str], ...] = device) -> float:
        return after[(name, labels)] - before.get((name, labels), 0.0)

    assert moved("generated_tokens_total", ()) == 6
    assert moved("requests_total", (("outcome", "done"),)) == 1
    assert moved("layerzero_batcher_items_total") == moved("layerzero_batcher_batch_size_sum") > 0
    assert moved("layerzero_batcher_items_total") == moved("layerzero_batcher_queue_wait_seconds_count")
    assert moved("layerzero_batcher_calls_total", (("device", "cpu"), ("outcome", "done"))) > 0
    assert moved("layerzero_batcher_tokens_total") > moved("layerzero_batcher_batch_size_count") > 0
    assert after[("layerzero_batcher_in_flight", device)] == 0
    assert after[("layerzero_batcher_queue_wait_seconds_sum", device)] > 0
    assert after[("layerzero_batcher_queue_wait_max_seconds", device)] > 0
    for outcome in ("failed", "cancelled", "expired", "rejected"):
        assert ("layerzero_batcher_calls_total", (("device", "cpu"), ("outcome", outcome))) in after
    assert after[("requests_in_flight", ())] == 0
    assert after[("kv_pages_free", ())] == 256


def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    """After SIGTERM a stream that has begun comes to its end, nothing new is taken, the exit code is 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    patience = str(int(LIMIT_S))  # a machine that is busy, or compiles meanwhile, takes its time
    script = Script("serve.py", "--port", str(port), "--pages", "64", "--drain-s", patience, folder=tmp_path)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, script)
        events: list[str] = []
        request = asked(max_tokens=300, temperature=0, stream=True)
        with loopback.stream("POST", f"{url}/v1/completions", json=request, timeout=LIMIT_S) as response:
            for line in response.iter_lines():
                if line:
                    events.append(line)
                if len(events) == 3 and line:
                    script.send_signal(signal.SIGTERM)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert script.wait() == 0, script.said
        with pytest.raises(httpx.ConnectError):
            loopback.get(f"{url}/health")
    finally:
        script.kill()


@pytest.mark.parametrize("arguments", [["--pages", "0"], ["--max-requests", "-1"], ["--per", "token"]])
def test_options_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command exits 2 and names the argument."""
    with pytest.raises(SystemExit) as left:
        server_app.parse(arguments)
    assert left.value.code == 2
    assert arguments[0] in capsys.readouterr().err
