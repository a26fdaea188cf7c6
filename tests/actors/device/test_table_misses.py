"""Calls that a dispatch table missed: measured in idle time, and folded into its next version."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.actors.device.tables.misses import EVERY_S, add_around
from layerzero.api.solve import solve
from layerzero.api.tune import tune_blocking
from layerzero.measure.shapes import norm
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.dispatch_table import Bucket, DispatchTable
from layerzero.selection.solver.ranges import Entry, compile_lookup
from layerzero.spec.errors import ConfigurationError
from tests.api.test_tune import clock, kernels
from tests.clocks import FakeClock

__all__ = ["clock"]  # timing reads a clock of the tests

WEIGHT, LONG = torch.randn(64), torch.randn(5000, 64)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Runtime]]:
    """Opens runtimes with a clock of the test's; `busy` is processor time that the process took."""
    opened_here: list[Runtime] = []

    def open_with(**more: Any) -> Runtime:
        given: dict[str, Any] = {"perfdb": None, "shipped_tables": False, "warm": "off", "device": "cpu"}
        runtime = Runtime(lz.Settings(**{**given, **more}), kernels=kernels, clock=FakeClock())
        runtime.started = True
        install(runtime)
        opened_here.append(runtime)
        return runtime

    yield open_with
    for runtime in opened_here:
        uninstall(runtime)
        runtime.close()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds of processor time that the process has taken, as the test says."""
    taken = SimpleNamespace(s=0.0)
    monkeypatch.setattr(
        "layerzero.actors.device.tables.misses.time", SimpleNamespace(process_time=lambda: taken.s)
    )
    return taken


@pytest.fixture
def table(tmp_path: Path, opened: Callable[..., Runtime]) -> Path:
    """A table of 7 to 512 rows."""
    runtime = opened()
    tune_blocking([norm("rms_norm", 16, 64, "float32"), norm("rms_norm", 256, 64, "float32")])
    solve(path := tmp_path / "table.json")
    uninstall(runtime)
    return path


def pass_time(runtime: Runtime, looks: int) -> None:
    """Let so many looks of the timer come, each with the work that it starts."""
    device = runtime.device()
    for _ in range(looks):
        device.clock.advance(EVERY_S)  # type: ignore[attr-defined]
        device.loader.run_later(lambda: None).wait(30)


def test_a_miss_is_measured_in_idle_time_and_folded_in(
    table: Path, tmp_path: Path, opened: Callable[..., Runtime], busy: SimpleNamespace
) -> None:
    """The next version decides it by measurement, keeps what was decided, and has the same policy digest."""
    runtime = opened(dispatch_table=str(table), next_dispatch_table=str(tmp_path / "next.json"))
    before = DispatchTable.load(table)
    for rows in (5000, 4999, 16):  # two of one key, one that is no miss
        lz.sync.rms_norm(LONG[:rows], WEIGHT)
    assert lz.select("rms_norm", LONG, WEIGHT).table_miss is not None
    pass_time(runtime, 1)
    assert not (tmp_path / "next.json").exists()
    pass_time(runtime, 1)
    after = DispatchTable.load(tmp_path / "next.json")
    assert after.policy == before.policy and after.content != before.content
    assert before.buckets[0] in after.buckets
    (bucket,) = [bucket for bucket in after.buckets if bucket.ranges["N"][0] <= 4999 <= bucket.ranges["N"][1]]
    assert bucket.kernel == "quick.rms_norm" and bucket.cost_source == "measured"
    chosen = lz.select("rms_norm", LONG, WEIGHT)
    assert chosen.kernel == "quick.rms_norm" and chosen.table_miss is None and "dispatch table" in chosen.why
    assert lz.select("rms_norm", LONG[:16], WEIGHT).why.startswith("the dispatch table's")
    assert runtime.counters.get("dispatch_table_misses", op="rms_norm") == 1


@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_added_lies_outside_of_what_was_decided(seed: int) -> None:
    """Whatever boxes are added: a call that was covered has its old bucket, and one in a new box has one."""
    draw = random.Random(seed)

    def box(kernel: str) -> Bucket:
        ends = [sorted(draw.randint(0, 12) for _ in range(2)) for _ in range(2)]
        ranges = {axis: (first, last) for axis, (first, last) in zip("NC", ends, strict=True)}
        return Bucket(
            op="rms_norm", kernel=kernel, expected_us=1.0, cost_source="measured", why="", dtype="float32",
            ranges=ranges,
        )  # fmt: skip

    def covers(bucket: Bucket, sizes: dict[str, int]) -> bool:
        return all(first <= sizes[axis] <= last for axis, (first, last) in bucket.ranges.items())

    old, new = add_around([], [box("old") for _ in range(2)]), [box("new") for _ in range(2)]
    of_one = compile_lookup([Entry(b.ranges, b) for b in add_around(old[:1], new[:1])])
    before, after = (
        compile_lookup([Entry(b.ranges, b) for b in buckets]) for buckets in (old, add_around(old, new))
    )
    for rows, columns in itertools.product(range(13), repeat=2):
        sizes = {"N": rows, "C": columns}
        if before(sizes) is not None:
            assert after(sizes) == before(sizes)
        found = after(sizes)
        assert found is None or found.kernel == "old" or any(covers(b, sizes) for b in new)
        assert (of_one(sizes) is not None) == (covers(old[0], sizes) or covers(new[0], sizes))
    assert add_around([], new[:1]) == new[:1]


def test_a_busy_process_measures_nothing_until_it_is_idle(
    table: Path, opened: Callable[..., Runtime], busy: SimpleNamespace
) -> None:
    """While a fifth of a core is used no miss is measured; the table may be its own next version."""
    runtime = opened(dispatch_table=str(table), next_dispatch_table=str(table))
    content = DispatchTable.load(table).content
    lz.sync.rms_norm(LONG, WEIGHT)
    for _ in range(3):
        busy.s += EVERY_S / 5
        pass_time(runtime, 1)
    assert not runtime.device().measured and DispatchTable.load(table).content == content
    pass_time(runtime, 2)
    assert DispatchTable.load(table).content != content


def test_under_another_policy_a_table_learns_nothing(
    table: Path, tmp_path: Path, opened: Callable[..., Runtime], busy: SimpleNamespace
) -> None:
    """A table says under which policy it was solved: what is missed under another waits for the first."""
    runtime = opened(dispatch_table=str(table), next_dispatch_table=str(tmp_path / "next.json"))
    lz.add_policy(prefer="claims", op="rms_norm")
    runtime.device().table_updater.wait()
    lz.sync.rms_norm(LONG, WEIGHT)
    pass_time(runtime, 3)
    assert not (tmp_path / "next.json").exists()
    lz.reset_policy()
    pass_time(runtime, 2)
    assert DispatchTable.load(tmp_path / "next.json").policy == DispatchTable.load(table).policy


def test_a_next_table_that_cannot_be_written_is_said(
    table: Path, tmp_path: Path, opened: Callable[..., Runtime], busy: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The decisions are in force all the same."""
    runtime = opened(dispatch_table=str(table), next_dispatch_table=str(tmp_path / "none" / "next.json"))
    (tmp_path / "none").write_text("a file where a folder is needed")
    lz.sync.rms_norm(LONG, WEIGHT)
    pass_time(runtime, 2)
    assert any("dispatch_table.not_written" in record.getMessage() for record in caplog.records)
    assert lz.select("rms_norm", LONG, WEIGHT).table_miss is None


def test_a_next_table_needs_one_before_it(opened: Callable[..., Runtime], tmp_path: Path) -> None:
    """Without a table nothing can be missed: the error names both settings."""
    with pytest.raises(ConfigurationError, match="next_dispatch_table needs a dispatch_table"):
        opened(next_dispatch_table=str(tmp_path / "next.json")).device()
