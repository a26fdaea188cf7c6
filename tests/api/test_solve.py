"""`lz.solve`: decisions made ahead, used where they hold, refused where they do not, missed out loud."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.api.tuning import publish, solve, tune_blocking
from layerzero.errors import CacheCorruptionError, ConfigurationError
from layerzero.reasons import Reason
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.solved import DispatchTable, content_hash
from layerzero.tuning.shapes import norm
from tests.api.test_tuning import clock, kernels, taking
from tests.kernels import kernel

__all__ = ["clock"]  # the fixture that gives these tests a clock of their own

X, WEIGHT, LONG = torch.randn(16, 64), torch.randn(64), torch.randn(5000, 64)


def opened(made: list[Any] | None = None, **more: Any) -> Runtime:
    given: dict[str, Any] = {"perfdb": None, "shipped_tables": False, "warm": "off"}
    runtime = Runtime(lz.Settings(**{**given, **more}), kernels=lambda: made or kernels())
    runtime.started = True
    install(runtime)
    return runtime


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    """A dispatch table of two buckets, solved from measurements in which `quick` wins."""
    runtime = opened()
    path = tmp_path / "dispatch_table.json"
    tune_blocking([norm("rms_norm", 16, 64, "float32"), norm("rms_norm", 256, 64, "float32")])
    solve(path)
    uninstall(runtime)
    runtime.close()
    yield path


@pytest.fixture
def closing() -> Iterator[list[Runtime]]:
    """Runtimes that the test opened, closed at its end."""
    made: list[Runtime] = []
    yield made
    for runtime in made:
        uninstall(runtime)
        runtime.close()


def test_a_table_says_what_it_decides_and_for_what(table: Path) -> None:
    """Readable buckets with kernel, time, source and reason; machine, policy, limits and content by hash."""
    solved = DispatchTable.load(table)
    assert [(b.op, b.dims["N"], b.kernel, b.source) for b in solved.buckets] == [
        ("rms_norm", 16, "quick.rms_norm", "measured"), ("rms_norm", 256, "quick.rms_norm", "measured"),
    ]  # fmt: skip
    assert solved.content == content_hash(solved.buckets) and solved.hardware.platform == "cpu"
    assert sum('"kernel"' in line for line in table.read_text().splitlines()) == 2


def test_calls_in_a_bucket_take_its_kernel(table: Path, closing: list[Runtime]) -> None:
    """A process that measured nothing chooses as solved: for the solved sizes, and all of their buckets."""
    closing.append(opened(dispatch_table=str(table)))
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    assert lz.which("rms_norm", torch.randn(200, 64), WEIGHT) == "quick.rms_norm"
    assert "dispatch table" in lz.select("rms_norm", X, WEIGHT).why


def test_a_miss_is_chosen_at_run_time_and_said(table: Path, closing: list[Runtime]) -> None:
    """PLAN_BUCKET_MISS in the record and a counter; the call runs all the same."""
    runtime = opened(dispatch_table=str(table))
    closing.append(runtime)
    lz.sync.rms_norm(LONG, WEIGHT)
    last = lz.last_selection()
    assert last is not None and last.plan_miss is not None
    assert last.plan_miss.reason is Reason.PLAN_BUCKET_MISS and last.why.startswith("PLAN_BUCKET_MISS")
    assert last.kernel == "claims.rms_norm" and last.as_plain()["plan_miss"]["reason"] == "PLAN_BUCKET_MISS"
    assert runtime.counters.get("plan_bucket_misses", op="rms_norm") == 1
    lz.sync.rms_norm(X, WEIGHT)
    hit = lz.last_selection()
    assert hit is not None and hit.plan_miss is None


def test_without_a_table_nothing_is_missed(closing: list[Runtime]) -> None:
    """The negative control: no table, no misses."""
    closing.append(opened())
    assert lz.select("rms_norm", X, WEIGHT).plan_miss is None


def test_a_kernel_out_of_service_is_not_run_for_a_table(table: Path, closing: list[Runtime]) -> None:
    """Policy and health stand above the table: the choice is made anew, and says why."""
    runtime = opened(dispatch_table=str(table))
    closing.append(runtime)
    runtime.device().health.quarantine("quick.rms_norm", "it lied")
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel != "quick.rms_norm" and "quick.rms_norm" in chosen.why and "it lied" in chosen.why
    with lz.disabled("quick.rms_norm"):
        assert lz.which("rms_norm", X, WEIGHT) != "quick.rms_norm"


@pytest.mark.parametrize("damage", ["machine", "limits", "content", "format", "cut"])
def test_a_table_that_does_not_hold_is_refused(
    table: Path, closing: list[Runtime], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine, changed limits, an edited bucket, another format, half a file: not used, and said."""
    solved = DispatchTable.load(table)
    made = kernels()
    if damage == "machine":
        other = msgspec.structs.replace(solved.hardware, torch="9.9")
        msgspec.structs.replace(solved, hardware=other).save(table)
    elif damage == "limits":
        made[1] = kernel("quick.rms_norm", taking(100.0), launch_us=50.0, contiguous=True)
    else:
        text = table.read_text()
        spoiled = {
            "content": text.replace("quick.rms_norm", "claims.rms_norm", 1),
            "format": text.replace('"format": 1', '"format": 7'),
            "cut": text[: len(text) // 2],
        }
        table.write_text(spoiled[damage])
    closing.append(opened(made, dispatch_table=str(table)))
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel == "claims.rms_norm" and chosen.plan_miss is None
    assert any("dispatch_table.refused" in record.getMessage() for record in caplog.records)
    closing.pop().close()
    strict = opened(made, dispatch_table=str(table), strict=True)
    closing.append(strict)
    with pytest.raises(ConfigurationError, match=r"dispatch_table\.json"):
        strict.device()


def test_there_is_something_to_solve(tmp_path: Path, closing: list[Runtime]) -> None:
    """Without measurements solving is an error that says what to do; a missing file is one, too."""
    closing.append(opened())
    with pytest.raises(ConfigurationError, match="tune first"):
        solve(tmp_path / "t.json")
    with pytest.raises(CacheCorruptionError, match=r"t\.json"):
        DispatchTable.load(tmp_path / "t.json")


def test_every_bucket_is_warmed(tmp_path: Path, closing: list[Runtime]) -> None:
    """E10.4: a better kernel that was cold is loaded once and taken; one that does not load is not."""
    loads: list[str] = []

    def cold(name: str, us: float, fails: bool = False) -> Any:
        def load() -> Any:
            loads.append(name)
            if fails:
                raise ImportError("no such library")
            return taking(us)

        return kernel(f"{name}.rms_norm", load=load, cold=True, launch_us=us)

    plain = kernel("plain.rms_norm", taking(500.0), launch_us=500.0)
    runtime = opened([plain, cold("broken", 1.0, fails=True), cold("better", 100.0)])
    closing.append(runtime)
    device = runtime.device("cpu")
    calls = [norm("rms_norm", n, 64, "float32") for n in (16, 256, 2048)]
    tune_blocking(calls)
    rows = device.measured
    device.close()
    uninstall(runtime)
    runtime = opened([plain, cold("broken", 1.0, fails=True), cold("better", 100.0)])
    closing.append(runtime)
    device, loads[:] = runtime.device("cpu"), []
    publish(device, rows)
    table = solve(tmp_path / "dispatch_table.json")
    assert [bucket.kernel for bucket in table.buckets] == ["better.rms_norm"] * 3
    assert loads.count("better") == 1 and loads.count("broken") <= 1
    assert device.counters.get("buckets_warmed", op="rms_norm") == 3


def test_a_table_put_in_force_during_lookups_is_never_torn(
    table: Path, tmp_path: Path, closing: list[Runtime]
) -> None:
    """CS-013: while tables are swapped by `configure`, every choice is one table's or the other's."""
    solved = DispatchTable.load(table)
    buckets = tuple(msgspec.structs.replace(b, kernel="claims.rms_norm") for b in solved.buckets)
    other = tmp_path / "other.json"
    msgspec.structs.replace(solved, buckets=buckets, content=content_hash(buckets)).save(other)
    closing.append(opened(dispatch_table=str(table)))
    stop, seen, torn = threading.Event(), set[str](), list[str]()

    def ask(rows: int) -> None:
        x = torch.randn(rows, 64)
        while not stop.is_set():
            chosen = lz.select("rms_norm", x, WEIGHT)
            seen.add(chosen.kernel)
            if "dispatch table" not in chosen.why:
                torn.append(chosen.why)

    threads = [threading.Thread(target=ask, args=(rows,)) for rows in (16, 200, 256)]
    for thread in threads:
        thread.start()
    for turn in range(5000):
        lz.configure(dispatch_table=str(table if turn % 2 else other))
        if turn >= 60 and len(seen) == 2:
            break
    lz.configure(dispatch_table=str(table))
    stop.set()
    for thread in threads:
        thread.join()
    assert seen == {"quick.rms_norm", "claims.rms_norm"} and torn == []
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"


def test_a_table_that_is_refused_changes_nothing(table: Path, tmp_path: Path, closing: list[Runtime]) -> None:
    """Where `strict` refuses a table, the one before stays in force, and so do the settings."""
    spoiled = tmp_path / "spoiled.json"
    spoiled.write_text(table.read_text().replace("quick.rms_norm", "claims.rms_norm", 1))
    runtime = opened(dispatch_table=str(table), strict=True)
    closing.append(runtime)
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    with pytest.raises(ConfigurationError, match=r"spoiled\.json"):
        lz.configure(dispatch_table=str(spoiled))
    assert runtime.settings.dispatch_table == runtime.device().settings.dispatch_table == str(table)
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    runtime.device().refresh()
    assert "dispatch table" in lz.select("rms_norm", X, WEIGHT).why
