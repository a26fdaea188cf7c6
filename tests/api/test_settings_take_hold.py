"""Every setting given to a running runtime takes hold as in one opened with it, or is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.actors.local import LocalDevice
from layerzero.api.tuning import solve
from layerzero.errors import BackendNotAvailableError
from layerzero.hardware import probe
from layerzero.health import JsonStore, State
from layerzero.health.store import QuarantineRecord
from layerzero.kernel import Kernel
from layerzero.lanes import BatchExecutor
from layerzero.native import HOT
from layerzero.ops import table as ops_table
from layerzero.perfdb.store import PerfDB
from layerzero.runtime import Runtime, install, uninstall
from layerzero.scheduler.fronts import Fronts
from layerzero.scheduler.modes import capture
from layerzero.scheduler.streams import Streams
from layerzero.settings import AT_OPENING, FIELDS
from tests.clocks import FakeClock
from tests.kernels import kernel
from tests.perfdb.rows import HERE, row, site

X, WEIGHT = torch.randn(8, 512), torch.randn(512)
FAST = "fast.rms_norm"
RAN_IN: list[str] = []


def noting(*args: Any) -> Any:
    """The reference, which says on which thread it ran."""
    RAN_IN.append(threading.current_thread().name)
    return ops_table.get("rms_norm").reference(*args)


def made() -> list[Kernel]:
    """Kernels apart by what settings decide between them."""
    large = kernel("large.layer_norm", launch_us=0.5)
    return [
        kernel(FAST, noting, launch_us=5.0, rank=60, graph_safe=True),
        kernel("near.rms_norm", launch_us=5.5, rank=10),
        kernel("usual.rms_norm", launch_us=7.0, default=True),
        kernel("cold.rms_norm", launch_us=1.0, cold=True),
        kernel("same.rms_norm", launch_us=90.0, batch_invariant=True),
        kernel("dense.layer_norm", contiguous=True),
        dataclasses.replace(large, workspace_bytes=lambda _: 1 << 20),
    ]


@dataclass
class Site:
    """A runtime with what observing it takes: its CPU, its loop, its clock, a folder, what was counted."""

    runtime: Runtime
    clock: FakeClock
    folder: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def cpu(self) -> LocalDevice:
        return self.runtime.device("cpu")

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coro)

    def idle(self) -> None:
        """Until the background thread has done what it was given, and what came of that."""
        for _ in range(2):
            done = threading.Event()
            if self.cpu._loading.submit(done.set):
                assert done.wait(60)


def which(at: Site) -> Any:
    """The kernel of a call and where its price comes from, once all is read."""
    at.cpu.expected(60.0)
    try:
        chosen = lz.select("rms_norm", X, WEIGHT)
    except lz.NoKernelFoundError:
        return None
    accepted = chosen.candidate(chosen.kernel).accepted
    return chosen.kernel, accepted.source if accepted is not None else "", chosen.why.partition(",")[0]


async def crowd() -> list[Any]:
    """Eight callers at once of an op and of a function, twice, so that the second time they are known."""
    results: list[Any] = []
    for _ in range(2):
        calls = [lz.rms_norm(X, WEIGHT) for _ in range(8)]
        results = list(await asyncio.gather(*calls, return_exceptions=True))
    return results


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A function over rows."""
    return x * 2


async def crowd_of_functions() -> None:
    """The same of an `lz.batched` function."""
    function = lz.batched(doubled)
    for _ in range(2):
        await asyncio.gather(*[function(X) for _ in range(8)])


def sizes(at: Site) -> Any:
    """How large batches were."""

    def counted() -> dict[int, int]:
        return dict(at.cpu.fronts.stats().sizes)

    found = []
    for calls in (crowd(), crowd_of_functions()):
        before = counted()
        at.run(calls)
        found.append({s: n - before.get(s, 0) for s, n in counted().items() if n != before.get(s, 0)})
    return found


def refused(at: Site) -> Any:
    """How many of eight callers the queue had no room for."""
    return sum(isinstance(result, lz.Overloaded) for result in at.run(crowd()))


def where(at: Site) -> Any:
    """The threads on which a lone caller's kernel runs."""

    async def alone() -> None:
        for _ in range(5):
            await lz.rms_norm(X, WEIGHT, backend=FAST)

    RAN_IN.clear()
    at.run(alone())
    return set(RAN_IN)


def turns(at: Site) -> Any:
    """Whether a lone caller's loop turns between its calls."""

    async def alone() -> int:
        count, going = 0, True

        def turn() -> None:
            nonlocal count
            count += 1
            if going:
                at.loop.call_soon(turn)

        at.loop.call_soon(turn)
        for _ in range(50):
            await lz.rms_norm(X, WEIGHT)
        going = False
        return count

    return at.run(alone()) >= 25


def order(at: Site) -> Any:
    """The order in which callers of several priorities are served one by one."""
    served: list[int] = []

    async def call(number: int, priority: int) -> None:
        await lz.rms_norm(X, WEIGHT, priority=priority)
        served.append(number)

    async def all_of_them() -> None:
        await asyncio.gather(*[call(n, p) for n, p in enumerate((2, 2, 2, 0, 0))])

    at.run(all_of_them())
    return served


def reaped(at: Site) -> Any:
    """Whether callers on streams are answered when their batch has run, and how many may be ahead."""
    before = REAPED[0]
    at.run(crowd())
    return REAPED[0] > before, [front.lane.caps.ahead for front in at.cpu.fronts.by_loop.values()]


REAPED = [0]


class NoStreams(Streams):
    """What a CUDA device has for streams, on a device that has none."""

    def ambient(self) -> Any:
        return None

    def reap(self, modes: Any, told: Callable[[Exception | None], object]) -> None:
        REAPED[0] += 1
        told(None)


def attach_streams(device: LocalDevice) -> None:
    """As `layerzero.lanes.attach` does for CUDA."""
    across = NoStreams(0, device.reaper, device.settings.completion)
    device.fronts = Fronts(
        BatchExecutor(device), device.worker, device.settings, always_inline=True, across=across
    )
    device.capture = capture


def remembered(at: Site) -> Any:
    """Keys that a table holds after calls of six sizes."""
    for n in range(6):
        layerzero.sync.rms_norm(torch.randn(4**n, 512), WEIGHT)
    return len(at.cpu.table(ops_table.get("rms_norm")).keyed)


def loaded(at: Site) -> Any:
    """Whether a better kernel that is cold has been loaded behind a call."""
    layerzero.sync.rms_norm(X, WEIGHT)
    at.idle()
    return "cold.rms_norm" not in at.cpu.registry.unready()


def fitting(at: Site) -> Any:
    """The kernel of a call for which one wants a workspace."""
    for _ in range(2):
        chosen = lz.which("layer_norm", X, WEIGHT)
        layerzero.sync.layer_norm(X, WEIGHT)
        at.clock.advance(2.0)
        at.idle()
    return chosen


def transformed(at: Site) -> Any:
    """Whether a call may be copied into the layout that a kernel needs."""
    try:
        return lz.select("layer_norm", X.repeat(1, 2)[:, ::2], WEIGHT, backend="dense").transforms
    except lz.NoKernelFoundError:
        return None


def differentiated(at: Site) -> Any:
    """Whether a result wants a gradient."""
    weight = WEIGHT.clone().requires_grad_()
    with torch.no_grad():  # what is remembered of such a call must not answer for the other
        layerzero.sync.rms_norm(X, weight, backend=FAST)
    return layerzero.sync.rms_norm(X, weight, backend=FAST).requires_grad


def safe(at: Site) -> Any:
    """Whether a kernel that only declares it may be captured."""
    rules = at.cpu._rules("rms_norm", at.cpu.snapshot.policy)
    return [k.capability.graph_safe for k in rules.kernels if k.id == FAST]


def sampled(at: Site) -> Any:
    """What stands around the plans that are made."""
    return [type(watcher).__name__ for watcher in at.cpu._watchers]


def default_device(at: Site) -> Any:
    """Where calls go that name no device."""
    return str(at.runtime.default_device())


def to_open(at: Site) -> Any:
    """Failures that open a circuit, and for how long; then a round that fails again."""
    health, count = at.cpu.health, 0
    health.quarantine(FAST, "")
    health.lift(FAST)
    while health.state(FAST) is State.CLOSED and count < 50:
        count += 1
        health.failure(FAST, "boom")
        at.clock.advance(7.0)
    waits = []
    for _ in range(2):
        due = health.next_change()
        if due is None:
            break
        waits.append(due - at.clock.now())
        at.clock.advance(waits[-1])
        probe = health.take_probe(FAST)
        assert probe is not None
        probe.failed("again")
    return count, [round(wait) for wait in waits]


def probing(at: Site) -> Any:
    """How many probes run at once, and whether one that never returns has failed after 70 s."""
    to_open(at)
    due = at.cpu.health.next_change()
    assert due is not None
    at.clock.advance(due - at.clock.now())
    probes = [at.cpu.health.take_probe(FAST) for _ in range(5)]
    at.clock.advance(70.0)
    at.cpu.health.tick()
    return sum(probe is not None for probe in probes), at.cpu.health.state(FAST)


@dataclass
class Case:
    """Two values of a setting and what is seen of it; `around` are the settings beside it."""

    before: Any
    after: Any
    seen: Callable[[Site], Any]
    around: dict[str, Any] = field(default_factory=dict)


INLINE = {"inline_limit_us": 1e9}
FULL = {**INLINE, "overload": "reject", "max_items": 1}
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
    ("max_keys", Case(4096, 2, remembered)),
    ("dispatch_table", Case(None, "{folder}/table.json", which)),
    ("batching", Case("all", "off", sizes, INLINE)),
    ("batching", Case("off", "rows", sizes, INLINE)),
    ("inline_limit_us", Case(1e9, 0.0, where)),
    ("max_inline_us", Case(1e9, 0.0, turns, INLINE)),
    ("max_items", Case(256, 3, sizes, INLINE)),
    ("max_items", Case(2, 256, sizes, INLINE)),
    ("max_tokens", Case(65_536, 16, sizes, INLINE)),
    ("max_bytes", Case(1 << 30, 1, sizes, INLINE)),
    ("queue_items", Case(2, 16_384, refused, FULL)),
    ("queue_bytes", Case(4 << 30, 1, refused, FULL)),
    ("overload", Case("wait", "reject", refused, {**FULL, "queue_items": 2})),
    ("completion", Case("stream", "host", reaped, INLINE)),
    ("completion", Case("host", "stream", reaped, INLINE)),
    ("ageing_ms", Case(1e9, 1e-9, order, {**INLINE, "max_items": 1})),
    ("check_rate", Case(0.0, 0.5, sampled)),
    ("drift_rate", Case(0.0, 0.5, sampled)),
    ("memory_headroom", Case(0.0, 1.0, fitting)),
    ("workspace_limit_bytes", Case(None, 1, fitting)),
    ("failures_to_open", Case(3, 8, to_open)),
    ("window_s", Case(60.0, 10.0, to_open)),
    ("cooldown_s", Case(30.0, 5.0, to_open)),
    ("cooldown_max_s", Case(960.0, 40.0, to_open)),
    ("probes", Case(1, 3, probing)),
    ("probe_timeout_s", Case(60.0, 600.0, probing)),
    ("spans", Case(False, True, sampled)),
]
REFUSED: dict[str, Any] = {
    "version": 2,
    "capabilities": "overlay.json",
    "cluster": "auto",
    "cluster_devices": 2,
    "freeze_gc": True,
    "hang_s": 5.0,
    "max_restarts": 1,
    "placement_timeout_s": 5.0,
    "plugins": ["acme"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy, a quarantine, measurements and a dispatch table, each of which changes a choice."""
    (tmp_path / "policy.yaml").write_text("rules:\n  - lock: usual.rms_norm\n    op: rms_norm\n")
    JsonStore(tmp_path / "state").save(QuarantineRecord(kernel=FAST, why="wrong"))

    async def write() -> None:
        async with PerfDB(str(tmp_path / "perfdb.sqlite")) as db:
            await db.add(HERE, [row("near.rms_norm", 0.5, site=site(C=512, N=n)) for n in (8, 16)])

    anyio.run(write)
    return tmp_path


@pytest.fixture
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Site]]:
    """Opens a runtime with settings as the process's, one after another."""
    before, sites = HOT.module, list[Site]()
    monkeypatch.setattr("layerzero.runtime.probe", lambda _: probe("cpu"))  # as if there were a GPU, too
    shipped = SimpleNamespace(rows=(row("near.rms_norm", 0.5, site=site(C=512, N=8)),))
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
    HOT.use(before)


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
        HOT.use(HOT.load() if native else None)
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    if name == "completion":
        monkeypatch.setattr("layerzero.opening.attach", attach_streams)
    if name == "spans":
        pytest.importorskip("opentelemetry.trace", reason="spans need opentelemetry-api")
    settings: dict[str, Any] = {"perfdb": None, "shipped_tables": False, "warm": "off", **case.around}
    settings = {key: given(value, folder) for key, value in settings.items()}
    before, after = given(case.before, folder), given(case.after, folder)
    if name == "dispatch_table":
        opened({**settings, "perfdb": f"{folder}/perfdb.sqlite"})
        solve(after)
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
    assert set(AT_OPENING) == set(REFUSED) - {"version"}


def test_what_one_change_refuses_changes_nothing_else(opened: Callable[[dict[str, Any]], Site]) -> None:
    """All at once or none: a limit beside a setting that is read at opening stays as it was."""
    at = opened({"warm": "off"})
    with pytest.raises(lz.ConfigurationError, match="freeze_gc"):
        lz.configure(max_items=1, freeze_gc=True)
    assert at.runtime.settings.max_items == 256


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
    assert [record.kernel for record in JsonStore(folder / "new").load()] == [FAST]


def test_callers_that_wait_for_room_get_what_is_new(opened: Callable[[dict[str, Any]], Site]) -> None:
    """A larger queue lets those in at once that stand before it."""
    at = opened({"warm": "off", "perfdb": None, "shipped_tables": False, "queue_items": 2})

    async def waiting() -> tuple[int, int, int]:
        calls = [asyncio.ensure_future(lz.rms_norm(X, WEIGHT)) for _ in range(8)]
        await asyncio.sleep(0)
        lane = at.cpu.fronts.current().lane
        few = lane.queued
        lz.configure(queue_items=100)
        more = lane.queued
        return few, more, len(await asyncio.gather(*calls))

    assert at.run(waiting()) == (2, 8, 8)
