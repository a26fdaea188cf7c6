"""The soak in short: every kind of end happens, kernels fail, and the counts agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import popen
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
ENDS = ("done", "failed", "cancelled", "expired", "rejected")


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a short soak found; its exit status speaks of times too, which no test does.

    The rarest end takes a second on a quiet machine; a busy one that has not seen it gets more time.
    """
    out = tmp_path_factory.mktemp("soak") / "soak.json"
    found: dict[str, Any] = {}
    for seconds in (2.5, 20):
        command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(seconds)]
        done = popen.run([*command, "--out", str(out)], timeout=LIMIT_S)
        assert out.exists(), done.stderr[-2000:]
        found = json.loads(out.read_text())["soak"]
        if all(found["ended"].get(name) for name in ENDS):
            break
    return found


def test_every_call_ends_once(soak: dict[str, Any]) -> None:
    """What callers saw and what the batcher counted are both whole."""
    lane, ended = soak["lane"], soak["ended"]
    assert lane["submitted"] == sum(lane[name] for name in ENDS)
    assert soak["asked"] == sum(ended.values())
    assert ended["rejected"] == lane["rejected"]


def test_every_kind_of_end_happened(soak: dict[str, Any]) -> None:
    """Otherwise the counts would prove nothing: calls were cancelled, expired, refused, poisoned, and met."""
    assert all(soak["ended"].get(name, 0) > 0 for name in ENDS)
    assert soak["mean_batch"] > 2


def test_the_injected_kernel_failed_unseen(soak: dict[str, Any]) -> None:
    """It was taken and it failed, and no caller of its op saw that: another kernel served the same call."""
    assert soak["injected"]["failures"] > 0
    assert soak["ended"]["failed"] == soak["lane"]["failed"]


def test_memory_and_lag_were_watched(soak: dict[str, Any]) -> None:
    """Both have their numbers; how large they are belongs to the long soak."""
    assert soak["memory_mib"]["last"] > 0 and soak["python_blocks"]["last"] > 0
    assert soak["lag_ms"]["looks"] > 100
    assert len(soak["verdicts"]) == 4
