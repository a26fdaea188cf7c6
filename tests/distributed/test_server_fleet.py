"""The generation server over two replicas in Ray actors, which die, restart and drain under its streams."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))

import httpx  # noqa: E402
import openai  # noqa: E402
from server import app as server_app  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.measure.calls import call, tensor  # noqa: E402
from layerzero.warmup import bundle as bundle_files  # noqa: E402
from tests.examples.serving import Running, asked, serving  # noqa: E402
from tests.waiting import LIMIT_S  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]
LONG = "In the beginning God created the heaven and the earth. And the earth was without form, and void;"


def save_bundle(path: Path) -> str:
    """A bundle of this environment; its digest."""
    with lz.start(lz.Settings(device="cpu", warm="off", perfdb=None), scoped=True):
        manifest = lz.Manifest(critical=(call("layer_norm", x=tensor(3, 8, dtype="float32")),))
        return lz.save_bundle(path, manifest).sha256


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the replicas look for a bundle in every process that they have."""
    path = tmp_path_factory.mktemp("bundle") / "warm.lzb"
    save_bundle(path)
    return path


@pytest.fixture(scope="module")
def fleet(ray_cluster: Any, bundle: Path) -> Iterator[Running]:
    """A server over two replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERZERO_MAX_RESTARTS", "100")
        patch.setenv("LAYERZERO_PLACEMENT_TIMEOUT_S", str(LIMIT_S))
        options = server_app.Options(pages=128, cluster="auto", replicas=2, bundle=bundle)
        with serving(options) as server:
            yield server


def on_loop(server: Running, coroutine: Any) -> Any:
    """The result of a coroutine on the server's loop."""
    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(coroutine, server.loop).result(LIMIT_S)


def health(server: Running) -> dict[str, Any]:
    """What /health says of each replica."""
    replicas: dict[str, Any] = httpx.get(f"{server.url}/health", timeout=60).json()["replicas"]
    return replicas


def counted(server: Running, name: str) -> dict[str, float]:
    """The samples of a metric, by the replica where it has one."""
    found = server.metrics()
    return {dict(labels).get("replica", ""): value for (each, labels), value in found.items() if each == name}


def all_running(server: Running) -> Any:
    """The pool, once each of its devices runs: one may have been killed before."""
    pool, until_s = server.service.pool, time.monotonic() + LIMIT_S
    while any(each.state.value != "running" for each in pool.devices.values()):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    return pool


def text(server: Running, **more: Any) -> str:
    """The text of one completion."""
    answer = httpx.post(f"{server.url}/v1/completions", json=asked(**more), timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


async def streamed(server: Running, seeds: range, first: asyncio.Event, **more: Any) -> list[str]:
    """The texts of streams that run at once; `first` is set when each has begun."""
    begun: set[int] = set()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:

        async def one(seed: int) -> str:
            events = await client.completions.create(**asked(seed=seed, **more), stream=True)
            parts, reasons = [], []
            async for event in events:
                parts.append(event.choices[0].text)
                reasons.append(event.choices[0].finish_reason)
                begun.add(seed)
                if len(begun) == len(seeds):
                    first.set()
            assert reasons[-1] in ("stop", "length"), "a stream ended without a reason"
            return "".join(parts)

        return list(await asyncio.gather(*map(one, seeds)))


def test_a_prompt_goes_where_it_is_known_and_new_ones_spread(fleet: Running) -> None:
    """The same prompt finds its pages at one replica; other prompts at once go to both."""
    alone = text(fleet, prompt=LONG, seed=5)
    before, routed = counted(fleet, "routed_tokens_total")[""], counted(fleet, "routed_total")
    for _ in range(3):
        assert text(fleet, prompt=LONG, seed=5) == alone
    rises = [count - routed.get(name, 0.0) for name, count in counted(fleet, "routed_total").items()]
    assert sorted(rises)[-1] == sum(rises) == 3, "one replica had all three"
    known = counted(fleet, "routed_tokens_total")[""] - before
    assert known == 3 * 16, "one full page of the prompt, three times"
    states = health(fleet)
    assert all(state["state"] == "running" for state in states.values())
    # Slow tests come first: the one below has left replicas that refused their bundle.
    assert all(("bundle" in state) != ("bundle_refused" in state) for state in states.values()), states
    asyncio.run(streamed(fleet, range(6), asyncio.Event(), max_tokens=4))
    assert set(counted(fleet, "routed_total")) == {"gpu-0", "gpu-1"}


def test_streams_of_a_killed_replica_go_on_at_the_other(fleet: Running) -> None:
    """Every client gets the whole text that it gets without a kill; some of them had begun at the victim."""
    more = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
    seeds = range(6)
    pool, moved = fleet.service.pool, fleet.service.moved

    async def cut() -> list[str]:
        first = asyncio.Event()
        texts = asyncio.ensure_future(streamed(fleet, seeds, first, **more))
        await asyncio.wait({texts, asyncio.ensure_future(first.wait())}, return_when="FIRST_COMPLETED")
        assert first.is_set(), texts.result()
        os.kill(pool.devices["gpu-0"].facts.pid, signal.SIGKILL)
        return await texts

    got = asyncio.run(cut())
    assert fleet.service.moved > moved, "no stream was cut"
    assert got == asyncio.run(streamed(fleet, seeds, asyncio.Event(), **more))


@pytest.mark.long
def test_a_rolling_restart_into_another_environment_refuses_the_bundle_and_serves(
    fleet: Running, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered all the while; then each replica says that the bundle is of another driver."""
    fields = bundle_files.environment_of

    def upgraded(*args: Any, **named: Any) -> Any:
        return {**fields(*args, **named), "driver": "999.1"}

    monkeypatch.setattr(bundle_files, "environment_of", upgraded)
    save_bundle(bundle)
    pool = all_running(fleet)
    before = {facts.name: facts.incarnation for facts in pool.facts}
    alone = text(fleet, seed=7)
    restart = asyncio.run_coroutine_threadsafe(pool.rolling_restart(), fleet.loop)  # type: ignore[arg-type]
    answered = 0
    while not restart.done():
        assert text(fleet, seed=7) == alone
        answered += 1
        time.sleep(0.05)
    restart.result()
    assert answered > 2 and all(facts.incarnation != before[facts.name] for facts in pool.facts)
    for state in health(fleet).values():
        assert "BUNDLE_ENVIRONMENT_DIFFERS" in state["bundle_refused"] and "bundle" not in state
    assert text(fleet, seed=7) == alone


# Last: it takes the replicas out.
def test_drained_replicas_get_nothing_and_without_one_the_error_is_named(fleet: Running) -> None:
    """Requests go to the one that is left; with none left the answer is 503 with the code of the reason."""
    pool = all_running(fleet)
    assert on_loop(fleet, pool.drain(LIMIT_S, on="gpu-0"))
    before = counted(fleet, "routed_total")["gpu-0"]
    assert len({text(fleet, prompt=f"{seed} {LONG}", seed=seed, max_tokens=2) for seed in range(3)})
    assert counted(fleet, "routed_total")["gpu-0"] == before
    assert health(fleet)["gpu-0"] == {"state": "draining"}
    assert counted(fleet, "replicas")[""] == 1
    assert on_loop(fleet, pool.drain(LIMIT_S))
    for more in ({}, {"stream": True}):
        refused = httpx.post(f"{fleet.url}/v1/completions", json=asked(**more), timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "DEVICE_LOST")
        assert refused.headers["retry-after"] == "1"
    assert fleet.service.router.load("gpu-0") == fleet.service.router.load("gpu-1") == 0
    assert fleet.service.active == 0
