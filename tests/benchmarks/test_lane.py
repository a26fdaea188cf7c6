"""The generation benchmark runs whole and its record is complete; how fast anything is, is not asserted."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from tests import popen
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "examples"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

pytest.importorskip("safetensors", reason="the model of the examples needs safetensors")
pytest.importorskip("httpx", reason="the client of the server comparison needs httpx")

by_hand, crowd, models, offered = (
    importlib.import_module(f"generating.{name}") for name in ("by_hand", "crowd", "models", "offered")
)
lane = importlib.import_module("lane")

CROWD = crowd.Crowd(requests=3, context=20, seconds=0.2)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run of two sections wrote."""
    out = tmp_path_factory.mktemp("lane") / "lane.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "lane.py"), "--quick", "--out", str(out)]
    done = popen.run(
        [*command, "--sections", "generation,queues"],
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def test_every_side_has_numbers(record: dict[str, Any]) -> None:
    """Each way of awaiting and both loops by hand, for each number of requests, with its batch."""
    rows = record["generation"]["rows"]["tiny"]["contexts"]["16"]
    assert set(rows) == {"1", "4"}
    for sides in rows.values():
        assert set(sides) == {"per op", "per layer", "per step", "by hand, paged", "by hand, contiguous"}
        assert all(side["tokens_per_s"] > 0 for side in sides.values())
    assert rows["4"]["per step"]["mean_batch"] > 2
    shares = record["generation"]["rows"]["tiny"]["where"]["16"]
    assert set(shares) == {"per op", "per layer", "per step"}
    assert all(sum(parts.values()) == pytest.approx(1, abs=0.01) for parts in shares.values())
    assert record["generation"]["environment"]["torch"] == torch.__version__
    assert record["generation"]["awaited_path"].startswith(("compiled", "Python alone"))


def test_bursts_and_queues_have_verdicts(record: dict[str, Any]) -> None:
    """Each of the three says what it measured and whether that is what was promised."""
    rows = record["queues"]["rows"]
    assert set(rows) == {"burst", "load", "depths"}
    assert all(isinstance(row["met"], bool) for row in rows.values())
    for load in (rows["load"], rows["load"]["by_hand"]):
        assert load["met"] == (load["p50_of_90_over_10"] < 2)
        assert sum(load["where"].values()) == pytest.approx(1, abs=0.01)
    assert all(burst["requests"] == 1000 and burst["mean_batch"] > 1 for burst in rows["burst"]["rounds"])


def test_a_failed_item_costs_no_other_and_late_ones_are_named() -> None:
    """The record is written after each item; an error is in it, and what there was no time for."""
    written: list[tuple[int, int, int]] = []
    section: Any = None

    def save() -> None:
        written.append((len(section.rows), len(section.failed), len(section.left_out)))

    section = lane.Section(time.monotonic() + 60, save)
    assert section.item("one", lambda: 3, "mid", "128") == 3
    assert section.item("two", lambda: 1 // 0, "mid", "2048") is None
    assert section.has("three", 1.0)
    assert not section.has("four", 100.0)
    assert section.rows == {"mid": {"128": 3}}
    assert "ZeroDivisionError" in section.failed["two"]
    assert section.left_out == ["four"]
    assert written == [(1, 0, 0), (1, 1, 0), (1, 1, 1)]


def prefilled(model: Any, length: int) -> Any:
    """A sequence whose first `length` tokens are what the pool holds."""
    sequence = model.sequence(length + 8)
    sequence.extend(length)
    return sequence


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_the_loop_by_hand_computes_the_same(kind: str) -> None:
    """Three steps of three sequences of different lengths give the logits that the model gives."""
    with lz.start(lz.Settings(device="cpu", inference=True)), torch.inference_mode():
        model = models.build("tiny", pages=CROWD.pages(16))
        lengths = [20, 17, 5]
        mine, other = ([prefilled(model, n) for n in lengths] for _ in range(2))
        cache: Any
        if kind == "paged":
            cache = by_hand.Paged(model)
            for one, two in zip(mine, other, strict=True):  # the same keys and values in other pages
                for layer in model.layers:
                    for pool in (layer.k_cache, layer.v_cache):
                        pool[two.pages[: len(one.pages)]] = pool[one.pages]
        else:
            cache = by_hand.Contiguous(model, 3, 32)
            for row, (one, n) in enumerate(zip(mine, lengths, strict=True)):
                for index, layer in enumerate(model.layers):
                    for dense, pool in ((cache.keys, layer.k_cache), (cache.values, layer.v_cache)):
                        dense[index, row, :, :n] = pool[one.pages].flatten(0, 1)[:n].transpose(0, 1)
        cache.join(other, lengths)
        ids = torch.tensor([3, 1, 2])
        for _ in range(3):
            wanted = model.step_batch(ids, [sequence.extend(1) for sequence in mine])
            got = by_hand.step(cache, ids)
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
            ids = wanted.argmax(-1)


@pytest.mark.parametrize("per", ["op", "layer", "step"])
def test_a_crowd_leaves_nothing_behind(per: Any) -> None:
    """When a crowd has gone its pages are free and its calls have ended."""
    with lz.start(lz.Settings(device="cpu", inference=True)) as runtime, torch.inference_mode():
        model = models.build("tiny", pages=CROWD.pages(16))
        span = asyncio.run(crowd.awaited(runtime, model, CROWD, per))
        stats = runtime.device("cpu").loop_drivers.stats()
        assert span.tokens > 0
        assert model.cache.allocator.free_pages == CROWD.pages(16)
        assert stats.submitted == stats.ended


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not installed is a result with its reason."""
    monkeypatch.setitem(offered.PEERS, "LitServe", ("no_such_server", "behind_litserve.py"))
    monkeypatch.setitem(offered.PEERS, "Ray Serve", ("no_such_package.serve", "behind_ray.py"))
    found = offered.compare(offered.Traffic(seconds=0.1))
    assert found["LitServe"] == {"refused": "no_such_server is not installed"}
    assert found["Ray Serve"] == {"refused": "no_such_package.serve is not installed"}


@pytest.mark.parametrize("phase", [0.0, 0.3, 0.7, 0.99])
def test_a_window_that_cuts_steps_counts_whole_ones(phase: float) -> None:
    """Four tokens every second, close together: four a second wherever the window begins."""
    every = [step + token * 0.001 for step in range(9) for token in range(4)]
    window = [at for at in every if phase <= at < phase + 5.5]
    seconds, tokens = crowd.whole_steps(window, 4)
    assert tokens == 4 * round(seconds)
    assert tokens / seconds == pytest.approx(4.0)
    assert crowd.whole_steps(window[:4], 4) is None


def test_one_request_is_counted_from_token_to_token() -> None:
    """A request alone has a token a step."""
    assert crowd.whole_steps([0.5, 1.5, 2.5, 3.5], 1) == (2.0, 2)
