"""Servers that take turns: what two parts of a measurement come to, and who stands still meanwhile."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
offered = importlib.import_module("generating.offered")


def test_two_parts_are_one_measurement() -> None:
    """Requests, tokens and seconds add up; a batch counts by its tokens."""
    whole = offered.Seen(2.0, [0.1, 0.3], 30, 2.0) + offered.Seen(1.0, [0.2], 10, 6.0, failed=1)
    assert (whole.seconds, whole.latencies_s, whole.tokens) == (3.0, [0.1, 0.3, 0.2], 40)
    assert (whole.mean_batch, whole.failed, whole.per_s) == (3.0, 1, 1.0)
    assert whole.row()["p50_ms"] == 200.0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _becomes(pid: int, stopped: bool) -> bool:
    until = time.monotonic() + 20
    while (_state(pid) == "T") is not stopped and time.monotonic() < until:
        time.sleep(0.01)
    return (_state(pid) == "T") is stopped


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc")
def test_who_has_no_turn_stands_still() -> None:
    """Every process of the other server's session is stopped, also a child's, and goes on afterwards."""
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        served = offered.Served("http://127.0.0.1:1", other.pid)
        until = time.monotonic() + 20
        while len(family := _session(other.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(family) == 2
        with offered.Served("http://127.0.0.1:2", 0).alone([served]):
            assert all(_becomes(pid, True) for pid in family)
        assert all(_becomes(pid, False) for pid in family)
    finally:
        offered._end(other)


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(entry.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found
