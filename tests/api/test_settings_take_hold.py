"""Every setting given to a running runtime takes hold as in one opened with it, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import layerzero as lz
import layerzero.sync
from layerzero.api.solve import solve
from layerzero.health import JsonQuarantineStore
from layerzero.health.store import QuarantineRecord
from layerzero.native import FAST_PATH
from layerzero.perfdb.store import PerfDB
from layerzero.runtime import Runtime, install, uninstall
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.hardware import probe
from layerzero.spec.settings import FIELDS, READ_AT_START
from tests.calls.seen import (
    FAST,
    WEIGHT,
    Site,
    StreamedDevice,
    X,
    compiled_apart,
    default_device,
    differentiated,
    expiring,
    fitting,
    learning,
    loaded,
    made,
    order,
    probing,
    reaped,
    rechecked,
    refused,
    remembered,
    repaid,
    safe,
    sampled,
    sharing,
    sizes,
    to_open,
    transformed,
    turns,
    where,
    which,
)
from tests.clocks import FakeClock
from tests.perfdb.rows import HERE, row, site


@dataclass
class Case:
    """Two values of a setting and what is seen of it; `around` are the settings beside it."""

    before: Any
    after: Any
    seen: Callable[[Site], Any]
    around: dict[str, Any] = field(default_factory=dict)


INLINE = {"inline_limit_us": 1e9}
# What queues and joins, and nothing at once: how many calls that takes is learned from their times.
QUEUED = {**INLINE, "max_inline_us": 0.0}
FULL = {**QUEUED, "queue_full_policy": "reject", "max_batch_size": 1}
CASES: list[tuple[str, Case]] = [
    ("device", Case("cpu", "cuda:1", default_device)),
    ("policy", Case(None, "{folder}/policy.yaml", which)),
    ("state_dir", Case(None, "{folder}/state", which)),
    ("perfdb", Case(None, "{folder}/perfdb.sqlite", which)),
    ("perfdb_days", Case(None, 1.0, which, {"perfdb": "{folder}/perfdb.sqlite"})),
    ("shipped_tables", Case(False, True, which)),
    ("strict", Case(False, True, transformed)),
    ("inference", Case(None, True, differentiated)),
    ("inference", Case(True, None, differentiated)),
    ("determinism", Case("default", "strict", which)),
    ("graph_strict", Case(False, True, safe)),
    ("tie_band", Case(1e-9, 0.9, which, {"default_gain": 0.0})),
    ("default_gain", Case(0.0, 100.0, which)),
    ("warm", Case("off", "background", loaded)),
    ("warm", Case("off", "eager", loaded)),
    ("compile_processes", Case(0, 2, compiled_apart)),
    ("compile_processes", Case(None, 0, compiled_apart)),
    ("payback_calls", Case(10_000_000, None, repaid)),
    ("max_keys", Case(4096, 2, remembered)),
    ("plan_ttl_s", Case(None, 5.0, expiring)),
    ("dispatch_table", Case(None, "{folder}/table.json", which)),
    (
        "next_dispatch_table",
        Case(None, "{folder}/next.json", learning, {"dispatch_table": "{folder}/table.json"}),
    ),
    ("shared_choices_s", Case(None, 5.0, sharing)),
    ("batching", Case("all", "off", sizes, QUEUED)),
    ("batching", Case("off", "rows", sizes, QUEUED)),
    ("inline_limit_us", Case(1e9, 0.0, where)),
    ("max_inline_us", Case(1e9, 0.0, turns, INLINE)),
    ("max_batch_size", Case(256, 3, sizes, QUEUED)),
    ("max_batch_size", Case(2, 256, sizes, QUEUED)),
    ("max_num_batched_tokens", Case(65_536, 16, sizes, QUEUED)),
    ("max_batch_bytes", Case(1 << 30, 1, sizes, QUEUED)),
    ("max_queue_size", Case(2, 16_384, refused, FULL)),
    ("max_queue_bytes", Case(4 << 30, 1, refused, FULL)),
    ("queue_full_policy", Case("wait", "reject", refused, {**FULL, "max_queue_size": 2})),
    ("completion", Case("stream", "host", reaped, INLINE)),
    ("completion", Case("host", "stream", reaped, INLINE)),
    ("priority_aging_ms", Case(1e9, 1e-9, order, {**INLINE, "max_batch_size": 1})),
    ("check_rate", Case(0.0, 0.5, sampled)),
    ("drift_rate", Case(0.0, 0.5, sampled)),
    ("kernel_times", Case(False, True, sampled)),
    ("output_check_s", Case(0.0, 5.0, rechecked)),
    ("memory_headroom", Case(0.0, 1.0, fitting)),
    ("workspace_limit_bytes", Case(None, 1, fitting)),
    ("failures_to_open", Case(3, 8, to_open)),
    ("window_s", Case(60.0, 10.0, to_open)),
    ("cooldown_s", Case(30.0, 5.0, to_open)),
    ("cooldown_max_s", Case(960.0, 40.0, to_open)),
    ("probes", Case(1, 3, probing)),
    ("probe_timeout_s", Case(60.0, 600.0, probing)),
    ("spans", Case(False, True, sampled)),
    ("call_spans", Case(False, True, sampled)),
]
REFUSED: dict[str, Any] = {
    "version": 2,
    "capabilities": "overlay.json",
    "cluster": "auto",
    "cluster_devices": 2,
    "cluster_devices_per_gpu": 2,
    "freeze_gc": True,
    "hang_s": 5.0,
    "isolate": {"torch": "process"},
    "isolate_timeout_s": 5.0,
    "max_restarts": 1,
    "nvtx": True,
    "placement_timeout_s": 5.0,
    "plugins": ["acme"],
    "timeline": "trace.json",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy, a quarantine, measurements and a dispatch table, each of which changes a choice."""
    (tmp_path / "policy.yaml").write_text("rules:\n  - lock: usual.rms_norm\n    op: rms_norm\n")
    JsonQuarantineStore(tmp_path / "state").save(QuarantineRecord(kernel=FAST, why="wrong"))

    async def write() -> None:
        async with PerfDB(str(tmp_path / "perfdb.sqlite")) as db:
            await db.add(HERE, [row("near.rms_norm", 0.5, case=site(C=512, N=n)) for n in (8, 16)])

    anyio.run(write)
    return tmp_path


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Site]]:
    """Opens a runtime with settings as the process's, one after another."""
    before, sites = FAST_PATH.module, list[Site]()
    monkeypatch.setattr(
        "layerzero.runtime.runtime.probe", lambda _: probe("cpu")
    )  # as if there were a GPU, too
    shipped = SimpleNamespace(rows=(row("near.rms_norm", 0.5, case=site(C=512, N=8)),))
    monkeypatch.setattr("layerzero.perfdb.shipped.fitting_tables", lambda *_: [shipped])

    def close() -> None:
        for at in sites:
            at.loop.close()
            uninstall(at.runtime)
            at.runtime.close()
        sites.clear()

    def open_with(settings: dict[str, Any]) -> Site:
        close()
        clock = FakeClock()
        runtime = Runtime(lz.Settings(**settings), kernels=made, clock=clock)
        runtime.started = True
        install(runtime)
        sites.append(Site(runtime, clock, folder))
        return sites[-1]

    yield open_with
    close()
    FAST_PATH.use(before)


def given(value: Any, folder: Path) -> Any:
    """A value with the test's folder in it."""
    return value.format(folder=folder) if isinstance(value, str) else value


@pytest.mark.parametrize("native", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}={c.after}" for n, c in CASES])
def test_a_setting_takes_hold_as_if_the_runtime_had_been_opened_with_it(
    opened: Callable[[dict[str, Any]], Site], folder: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, case: Case, inside: bool, native: bool,
) -> None:  # fmt: skip
    """What is seen after `configure` is what a fresh runtime shows, and was not seen before."""
    try:
        FAST_PATH.use(FAST_PATH.load() if native else None)
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    if name == "completion":
        monkeypatch.setattr("layerzero.runtime.open_device.ScheduledDevice", StreamedDevice)
    if name.endswith("spans"):
        pytest.importorskip("opentelemetry.trace", reason="spans need opentelemetry-api")
    settings: dict[str, Any] = {"perfdb": None, "shipped_tables": False, "warm": "off", **case.around}
    settings = {key: given(value, folder) for key, value in settings.items()}
    before, after = given(case.before, folder), given(case.after, folder)
    if name.endswith("dispatch_table"):
        opened({"perfdb": f"{folder}/perfdb.sqlite", "shipped_tables": False, "warm": "off"})
        solve(folder / "table.json")
    at = opened({**settings, name: before})
    first = case.seen(at)

    async def configure() -> None:
        lz.configure(**{name: after})

    if inside:
        at.run(configure())
    else:
        lz.configure(**{name: after})
    assert getattr(lz.get_config(), name) == after
    configured = case.seen(at)
    fresh = case.seen(opened({**settings, name: after}))
    assert configured == fresh
    assert first != fresh, "this does not tell one value from the other"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_only_opening_reads_is_refused_by_name(
    opened: Callable[[dict[str, Any]], Site], name: str
) -> None:
    """The error names the setting, and nothing has changed."""
    at = opened({"warm": "off"})
    before = at.runtime.settings
    with pytest.raises(lz.ConfigurationError, match=rf"^{name} "):
        lz.configure(**{name: REFUSED[name]})
    assert at.runtime.settings is before


def test_no_setting_is_left_out() -> None:
    """Each field of Settings is shown to take hold, or to be refused: one that comes new has to be, too."""
    assert {name for name, _ in CASES} | set(REFUSED) == set(FIELDS)
    assert set(READ_AT_START) == set(REFUSED) - {"version"}


def test_what_one_change_refuses_changes_nothing_else(opened: Callable[[dict[str, Any]], Site]) -> None:
    """All at once or none: a limit beside a setting that is read at opening stays as it was."""
    at = opened({"warm": "off"})
    with pytest.raises(lz.ConfigurationError, match="freeze_gc"):
        lz.configure(max_batch_size=1, freeze_gc=True)
    assert at.runtime.settings.max_batch_size == 256


def test_a_folder_that_takes_no_state_changes_nothing(
    opened: Callable[[dict[str, Any]], Site], folder: Path
) -> None:
    """Named by the error; the policy given beside it is not in force either, and quarantines stay known."""
    at = opened({"warm": "off", "perfdb": None})
    at.runtime.quarantine(FAST, "wrong")
    (folder / "file").write_text("")
    with pytest.raises(lz.ConfigurationError, match=r"^state_dir needs a folder .*/file/state"):
        lz.configure(state_dir=str(folder / "file" / "state"), policy=str(folder / "policy.yaml"))
    assert at.runtime.settings.state_dir is None and at.runtime.settings.policy is None
    assert lz.get_locks() == {} and which(at)[0] == "near.rms_norm"
    lz.configure(state_dir=str(folder / "new"), policy=str(folder / "policy.yaml"))
    assert lz.get_locks() == {"rms_norm": "usual.rms_norm"}
    assert [record.kernel for record in JsonQuarantineStore(folder / "new").load()] == [FAST]


def test_callers_that_wait_for_room_get_what_is_new(opened: Callable[[dict[str, Any]], Site]) -> None:
    """A larger queue lets those in at once that stand before it."""
    at = opened({"warm": "off", "perfdb": None, "shipped_tables": False, "max_queue_size": 2})

    async def waiting() -> tuple[int, int, int]:
        calls = [asyncio.ensure_future(lz.rms_norm(X, WEIGHT)) for _ in range(8)]
        await asyncio.sleep(0)
        lane = at.cpu.loop_drivers.current().batcher
        few = lane.queued
        lz.configure(max_queue_size=100)
        more = lane.queued
        return few, more, len(await asyncio.gather(*calls))

    assert at.run(waiting()) == (2, 8, 8)
