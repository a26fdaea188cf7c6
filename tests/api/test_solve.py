"""`lz.solve`: decisions made ahead, used where they hold, refused where they do not, missed out loud."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.api.solve import solve
from layerzero.api.tune import tune_blocking
from layerzero.measure.shapes import norm
from layerzero.measure.tuning import publish
from layerzero.perfdb.table_file import content_hash
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.spec.errors import CacheCorruptionError, ConfigurationError
from layerzero.spec.reasons import Reason
from tests.api.test_tune import clock, kernels, taking
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
    """A dispatch table, solved from measurements at 16 and 256 rows in which `quick` wins."""
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
    (bucket,) = solved.buckets
    assert (bucket.op, bucket.kernel, bucket.cost_source) == ("rms_norm", "quick.rms_norm", "measured")
    assert bucket.ranges == {"N": (7, 512), "C": (64, 64)}  # an octave around 16 and 256
    assert bucket.costs["quick.rms_norm"] < bucket.costs["claims.rms_norm"]
    assert solved.content == content_hash(solved.buckets) and solved.hardware.platform == "cpu"
    assert sum('"kernel"' in line for line in table.read_text().splitlines()) == 1


def test_calls_in_a_bucket_take_its_kernel(table: Path, closing: list[Runtime]) -> None:
    """A process that measured nothing chooses as solved: for the solved sizes, and all between them."""
    closing.append(opened(dispatch_table=str(table)))
    for rows in (16, 17, 100, 200, 256):
        assert lz.which("rms_norm", torch.randn(rows, 64), WEIGHT) == "quick.rms_norm"
    assert "dispatch table" in lz.select("rms_norm", X, WEIGHT).why


def test_a_miss_is_chosen_at_run_time_and_said(table: Path, closing: list[Runtime]) -> None:
    """DISPATCH_TABLE_MISS in the record and a counter; the call runs all the same."""
    runtime = opened(dispatch_table=str(table))
    closing.append(runtime)
    lz.sync.rms_norm(LONG, WEIGHT)
    last = lz.last_selection()
    assert last is not None and last.table_miss is not None
    assert last.table_miss.reason is Reason.DISPATCH_TABLE_MISS and last.why.startswith("DISPATCH_TABLE_MISS")
    assert (
        last.kernel == "claims.rms_norm" and last.as_plain()["table_miss"]["reason"] == "DISPATCH_TABLE_MISS"
    )
    assert runtime.counters.get("dispatch_table_misses", op="rms_norm") == 1
    lz.sync.rms_norm(X, WEIGHT)
    hit = lz.last_selection()
    assert hit is not None and hit.table_miss is None


def test_without_a_table_nothing_is_missed(closing: list[Runtime]) -> None:
    """The negative control: no table, no misses."""
    closing.append(opened())
    assert lz.select("rms_norm", X, WEIGHT).table_miss is None


def test_a_kernel_out_of_service_is_not_run_for_a_table(table: Path, closing: list[Runtime]) -> None:
    """Policy and health stand above the table: the choice is made anew, and says why."""
    runtime = opened(dispatch_table=str(table))
    closing.append(runtime)
    runtime.device().health.quarantine("quick.rms_norm", "it lied")
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel != "quick.rms_norm" and "quick.rms_norm" in chosen.why and "it lied" in chosen.why
    with lz.disable("quick.rms_norm"):
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
            "format": text.replace('"format": 3', '"format": 7'),
            "cut": text[: len(text) // 2],
        }
        table.write_text(spoiled[damage])
    closing.append(opened(made, dispatch_table=str(table)))
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel == "claims.rms_norm" and chosen.table_miss is None
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
    assert {bucket.kernel for bucket in table.buckets} == {"better.rms_norm"}
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


AHEAD = "the dispatch table's kernel"
RULES = "rules:\n  - prefer: claims.*\n    op: {op}\n"


def by_file(tmp_path: Path, op: str) -> dict[str, Any]:
    """Settings with a policy file that prefers `claims` for an op."""
    path = tmp_path / "policy.yaml"
    path.write_text(RULES.format(op=op))
    return {"policy": str(path)}


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("layer", ["file", "environment", "program", "block", "task", "boost"])
def test_a_preference_goes_before_a_table_that_was_solved_without_it(
    table: Path, tmp_path: Path, closing: list[Runtime], monkeypatch: pytest.MonkeyPatch,
    layer: str, strict: bool,
) -> None:  # fmt: skip
    """Wherever the preference comes from, it is followed, and the record says that the table is not."""
    more: dict[str, Any] = {}
    if layer == "file":
        more = by_file(tmp_path, "rms_norm")
    elif layer == "boost":
        (tmp_path / "policy.yaml").write_text("rules:\n  - boost: quick.*\n    factor: 1000000\n")
        more = {"policy": str(tmp_path / "policy.yaml")}
    elif layer == "environment":
        monkeypatch.setenv("LAYERZERO_PREFER", "rms_norm=claims")
    closing.append(opened(dispatch_table=str(table), strict=strict, **more))
    assert layer not in ("program", "block", "task") or lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    if layer == "program":
        lz.add_policy(prefer="claims", op="rms_norm")
    with lz.prefer("claims", op="rms_norm") if layer in ("block", "task") else contextlib.nullcontext():
        chosen = lz.select("rms_norm", X, WEIGHT)
        lz.sync.rms_norm(X, WEIGHT)
        last = lz.last_selection()
        if layer == "task":
            asyncio.run(awaited())
            last = lz.last_selection()
    assert last is not None and last.kernel == chosen.kernel == "claims.rms_norm"
    if layer in ("block", "task"):
        assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
        assert chosen.why.startswith("DISPATCH_TABLE_POLICY_DIFFERS, chosen at run time")
        assert chosen.table_miss is not None
        assert chosen.table_miss.reason is Reason.DISPATCH_TABLE_POLICY_DIFFERS
    else:  # the process's own policy: the table is solved again under it, soon
        assert chosen.why.startswith(("DISPATCH_TABLE_POLICY_DIFFERS, chosen at run time", AHEAD))
        closing[-1].device().table_updater.wait()
        again = lz.select("rms_norm", X, WEIGHT)
        assert again.kernel == "claims.rms_norm" and again.why.startswith(AHEAD) and again.table_miss is None


@pytest.mark.parametrize(
    "rule", ["boost: claims.*\n    factor: 0.001", "boost: quick.*\n    factor: 1000000"]
)
def test_a_preference_of_a_kernel_that_the_table_has_no_price_of_goes_before_it(
    table: Path, tmp_path: Path, closing: list[Runtime], rule: str
) -> None:
    """Tables of older formats price their own kernel alone: such a range is left to run time."""
    solved = DispatchTable.load(table)
    buckets = tuple(msgspec.structs.replace(b, costs={b.kernel: b.expected_us}) for b in solved.buckets)
    msgspec.structs.replace(solved, buckets=buckets, content=content_hash(buckets)).save(table)
    closing.append(opened(dispatch_table=str(table)))
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    (tmp_path / "policy.yaml").write_text(f"rules:\n  - {rule}\n")
    lz.load_policy(tmp_path / "policy.yaml")
    closing[-1].device().table_updater.wait()
    assert lz.select("rms_norm", X, WEIGHT).kernel == "claims.rms_norm"


def test_a_policy_that_is_taken_back_at_once_leaves_the_table_in_force(
    table: Path, closing: list[Runtime]
) -> None:
    """What was begun for the policy in between does not come in force after it."""
    closing.append(opened(dispatch_table=str(table)))
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    lz.add_policy(prefer="claims", op="rms_norm")
    lz.reset_policy()
    closing[-1].device().table_updater.wait()
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel == "quick.rms_norm" and chosen.why.startswith(AHEAD) and chosen.table_miss is None


async def awaited() -> None:
    """Calls that meet in a batch."""
    await asyncio.gather(*[lz.rms_norm(X, WEIGHT) for _ in range(4)])


def test_rules_that_have_no_bearing_on_a_call_leave_it_to_the_table(
    table: Path, tmp_path: Path, closing: list[Runtime]
) -> None:
    """Of another op, of another size, of another block: the call is decided as it was ahead."""
    closing.append(opened(dispatch_table=str(table), **by_file(tmp_path, "linear")))
    assert lz.select("rms_norm", X, WEIGHT).why.startswith(AHEAD)
    lz.add_policy(prefer="claims", op="attention")
    with lz.prefer("claims", op="mlp"):
        assert lz.select("rms_norm", X, WEIGHT).why.startswith("the dispatch table's")
    lz.lock("rms_norm", "claims.rms_norm", when="N > 100")
    assert lz.select("rms_norm", X, WEIGHT).why.startswith("the dispatch table's")
    large = lz.select("rms_norm", torch.randn(200, 64), WEIGHT)
    assert large.why.startswith("locked by") and large.table_miss is None


def test_a_table_holds_under_the_policy_that_it_was_solved_under(
    table: Path, tmp_path: Path, closing: list[Runtime]
) -> None:
    """With that policy it decides; without it, or with another, it is solved again before it does."""
    under = by_file(tmp_path, "rms_norm")
    closing.append(opened(**under))
    tune_blocking([norm("rms_norm", 16, 64, "float32")])
    solve(path := tmp_path / "under.json")
    assert DispatchTable.load(path).buckets[0].kernel == "claims.rms_norm"
    closing.pop().close()
    closing.append(opened(dispatch_table=str(path), **under))
    assert lz.select("rms_norm", X, WEIGHT).why.startswith("the dispatch table's")
    with lz.prefer("claims", op="linear"):
        assert lz.select("rms_norm", X, WEIGHT).why.startswith("the dispatch table's")
    lz.reset_policy()
    (tmp_path / "policy.yaml").write_text(RULES.format(op="linear"))
    lz.load_policy(tmp_path / "policy.yaml")
    table_updater = closing[-1].device().table_updater
    table_updater.wait()
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel == "quick.rms_norm" and chosen.why.startswith(AHEAD) and "policy" in chosen.why
    closing.pop().close()
    closing.append(opened(dispatch_table=str(path)))
    closing[-1].device().table_updater.wait()
    assert lz.select("rms_norm", X, WEIGHT).kernel == "quick.rms_norm"


@pytest.mark.parametrize("rule", ["deny: quick.*", "allow: claims.*", "lock: claims"])
def test_a_rule_that_is_taken_back_is_no_part_of_a_table_s_decisions(
    tmp_path: Path, closing: list[Runtime], rule: str
) -> None:
    """Solved while the best kernel was refused: solved again without the rule, the table takes it."""
    file = tmp_path / "policy.yaml"
    file.write_text(f"rules:\n  - {rule}\n    op: rms_norm\n")
    closing.append(opened())
    tune_blocking([norm("rms_norm", 16, 64, "float32")])
    best = lz.which("rms_norm", X, WEIGHT)
    lz.load_policy(file)
    solve(path := tmp_path / "under.json")
    (bucket,) = DispatchTable.load(path).buckets
    assert bucket.kernel == "claims.rms_norm" and bucket.costs[best] < bucket.costs[bucket.kernel]
    closing.pop().close()
    closing.append(opened(dispatch_table=str(path)))
    closing[-1].device().table_updater.wait()
    chosen = lz.select("rms_norm", X, WEIGHT)
    assert chosen.kernel == best == "quick.rms_norm" and chosen.why.startswith(AHEAD)


def test_a_table_is_solved_by_measurements_not_by_the_table_in_force(
    table: Path, tmp_path: Path, closing: list[Runtime]
) -> None:
    """Solving beside an old table gives what was measured since."""
    solved = DispatchTable.load(table)
    buckets = tuple(msgspec.structs.replace(b, kernel="claims.rms_norm") for b in solved.buckets)
    msgspec.structs.replace(solved, buckets=buckets, content=content_hash(buckets)).save(table)
    closing.append(opened(dispatch_table=str(table)))
    tune_blocking([norm("rms_norm", 16, 64, "float32")])
    assert lz.which("rms_norm", X, WEIGHT) == "claims.rms_norm"
    assert solve(tmp_path / "new.json").buckets[0].kernel == "quick.rms_norm"


@pytest.mark.parametrize("prefer", [False, True], ids=["table", "preference"])
def test_warming_a_table_up_ends_where_another_kernel_is_cheaper(
    table: Path, closing: list[Runtime], prefer: bool
) -> None:
    """The table's kernel is what the call waits for: `warmup` is ready, and so says `readiness_check`."""
    closing.append(opened(dispatch_table=str(table)))
    if prefer:
        lz.add_policy(prefer="claims", op="rms_norm")
    call = norm("rms_norm", 16, 64, "float32")
    report = lz.warmup_blocking([call])
    assert report.ready, report.critical
    assert report.critical[0].kernel == ("claims.rms_norm" if prefer else "quick.rms_norm")
    assert lz.readiness_check()


def test_a_table_s_cold_kernel_is_loaded_and_takes_over(table: Path, closing: list[Runtime]) -> None:
    """Until it is there a call takes the next best, and says which kernel comes when warm."""
    made = kernels()
    at = next(i for i, k in enumerate(made) if k.id == "quick.rms_norm")
    made[at] = dataclasses.replace(made[at], slow_import=True)
    closing.append(opened(made, dispatch_table=str(table)))
    early = lz.select("rms_norm", X, WEIGHT)
    assert early.kernel == "claims.rms_norm" and early.when_warm == "quick.rms_norm"
    assert lz.warmup_blocking([norm("rms_norm", 16, 64, "float32")]).critical[0].kernel == "quick.rms_norm"


@pytest.mark.parametrize(
    ("wrong", "why"), [("missing", "No such file"), ("content", "do not match its content hash")]
)
def test_a_process_whose_table_decides_nothing_is_not_ready(
    table: Path, tmp_path: Path, closing: list[Runtime], wrong: str, why: str
) -> None:
    """Missing or damaged: warm-up and readiness both name the table and why."""
    if wrong == "missing":
        table.unlink()
    else:
        table.write_text(table.read_text().replace("quick.rms_norm", "claims.rms_norm", 1))
    closing.append(opened(dispatch_table=str(table)))
    report = lz.warmup_blocking([norm("rms_norm", 16, 64, "float32")])
    standing = lz.readiness_check()
    assert not report.ready and not standing.ready and report.critical[0].state == "ready"
    assert report.problems == standing.problems
    assert str(table) in standing.problems[0] and standing.problems[0].startswith("dispatch_table: ")
    assert why in standing.problems[0]
    lz.configure(dispatch_table=None)
    assert lz.warmup_blocking([norm("rms_norm", 16, 64, "float32")]).ready and lz.readiness_check().ready


def test_a_dry_run_here_follows_the_block_it_stands_in(closing: list[Runtime]) -> None:
    """`dry_run` on the machine at hand is what `select` gives, preferences of the block included."""
    closing.append(opened())
    other = next(k.id for k in kernels() if k.id != lz.which("rms_norm", X, WEIGHT))
    with lz.prefer(other):
        assert lz.dry_run("rms_norm", X, WEIGHT).kernel == lz.which("rms_norm", X, WEIGHT) == other
        assert lz.dry_run("rms_norm", X, WEIGHT, strict=True).kernel == other
        assert lz.dry_run("rms_norm", X, WEIGHT, hardware="b200").policy != ""


def test_another_policy_is_seen_where_no_rule_of_the_op_changed(
    tmp_path: Path, closing: list[Runtime]
) -> None:
    """Known calls of an op are decided again when a rule of another op made the policy another one."""
    closing.append(opened(**by_file(tmp_path, "linear")))
    tune_blocking([norm("rms_norm", 16, 64, "float32")])
    solve(path := tmp_path / "under.json")
    lz.configure(dispatch_table=str(path))
    lz.sync.rms_norm(X, WEIGHT)
    assert lz.select("rms_norm", X, WEIGHT).why.startswith("the dispatch table's")
    (tmp_path / "policy.yaml").write_text(RULES.format(op="mlp"))
    lz.load_policy(tmp_path / "policy.yaml")
    lz.sync.rms_norm(X, WEIGHT)
    last = lz.last_selection()
    assert last is not None and last.why.startswith(("DISPATCH_TABLE_POLICY_DIFFERS", AHEAD))
    closing[-1].device().table_updater.wait()
    lz.sync.rms_norm(X, WEIGHT)
    last = lz.last_selection()
    assert last is not None and last.ahead and last.kernel == "quick.rms_norm"
