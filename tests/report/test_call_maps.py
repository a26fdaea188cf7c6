"""Heat maps: what was measured, who would be taken, and the regret of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

import layerzero as lz
from layerzero.perfdb import Measurement
from layerzero.perfdb.shipped import read_table
from layerzero.perfdb.store import PerfDB
from layerzero.report.call_maps import OWN, hardware_of, map_of_device, map_of_table, tables_for
from layerzero.report.document import CallMap, MeasuredCall
from layerzero.selection.cost.cost_model import TABLES
from tests.perfdb.rows import HERE, row, site

NEAR, FAR = site("layer_norm", N=8, C=512), site("layer_norm", N=64, C=512)


def stored(path: Path, *rows: Measurement) -> None:
    """A file of measurements of this machine."""

    async def write() -> None:
        async with PerfDB(path) as store:
            await store.add(HERE, rows)

    asyncio.run(write())


def mapped(tmp_path: Path, *rows: Measurement, **settings: object) -> CallMap:
    """The map of a device that has measured this."""
    path = tmp_path / "perfdb.sqlite"
    if rows:
        stored(path, *rows)
    given = lz.Settings(device="cpu", perfdb=str(path), shipped_tables=False, warm="off", **settings)  # type: ignore[arg-type]
    with lz.start(given, scoped=True) as runtime:
        return map_of_device(runtime.device())


def named(calls: CallMap, call: MeasuredCall) -> dict[str, float]:
    """A call's times by kernel."""
    return {calls.kernels[timed.kernel]: timed.us for timed in call.times}


def test_a_map_of_nothing_is_empty(tmp_path: Path) -> None:
    """A file that is missing, and one without rows, give a map without calls."""
    assert mapped(tmp_path).calls == ()
    stored(tmp_path / "perfdb.sqlite")
    assert mapped(tmp_path).calls == () and mapped(tmp_path).source == OWN


def test_the_kernel_that_is_taken_stands_beside_its_time_and_its_rivals(tmp_path: Path) -> None:
    """What selection says is what the map says: chosen, why, verdicts; regret is its time over the best."""
    calls = mapped(
        tmp_path,
        row("torch.layer_norm.native", 20.0, case=FAR),
        row("reference.layer_norm", 10.0, case=FAR),
        row("reference.layer_norm", 10.0, case=NEAR),
        row("torch.layer_norm.native", 10.2, case=NEAR),
    )
    assert [call.call for call in calls.calls] == ["float32 C=512 N=8", "float32 C=512 N=64"]
    near, far = calls.calls
    assert named(calls, far) == {"torch.layer_norm.native": 20.0, "reference.layer_norm": 10.0}
    assert (calls.kernels[far.chosen], far.regret) == ("reference.layer_norm", 1.0)
    # A tie is the default's, which is a regret of 2 %.
    assert (calls.kernels[near.chosen], near.regret) == ("torch.layer_norm.native", 1.02)
    assert "default" in calls.texts[near.why]
    refusals = [verdict for verdict in far.verdicts if verdict.expected_us is None]
    assert all(verdict.texts for verdict in far.verdicts) and len(far.verdicts) > len(refusals)


def test_the_policy_in_force_decides_on_the_map(tmp_path: Path) -> None:
    """A denied kernel refuses in the map as well, with the rule that denies it."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nrules:\n  - deny: [reference.layer_norm]\n")
    rows = (row("torch.layer_norm.native", 20.0, case=FAR), row("reference.layer_norm", 10.0, case=FAR))
    (call,) = (calls := mapped(tmp_path, *rows, policy=str(policy))).calls
    assert calls.kernels[call.chosen] == "torch.layer_norm.native" and call.regret == 1.0
    (denied,) = (v for v in call.verdicts if calls.kernels[v.kernel] == "reference.layer_norm")
    assert denied.expected_us is None and "POLICY_DENIED" in calls.texts[denied.texts[0]]


def test_what_no_measurement_may_move_is_not_on_the_map(tmp_path: Path) -> None:
    """Rows that selection distrusts are left out: too few samples, times that are none."""
    assert mapped(tmp_path, row("reference.layer_norm", case=FAR, samples=2)).calls == ()


def test_a_table_is_judged_as_its_own_machine() -> None:
    """The H200's table is chosen over with an H200's kernels, wherever the report is written."""
    table = read_table(TABLES / "cuda_h200.json")
    few = [each for each in table.rows if each.case.op in ("rope", "mlp")]
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        calls = map_of_table(msgspec.structs.replace(table, rows=tuple(few)), "cuda_h200", runtime.policy)
    assert (calls.source, calls.is_own) == ("table cuda_h200", False) and "NVIDIA H200" in calls.machine
    assert {call.launch for call in calls.calls} == {"eager", "graph"}
    chosen = {calls.kernels[call.chosen] for call in calls.calls}
    assert any(name.startswith(("flashinfer", "liger", "triton")) for name in chosen)
    regrets = [call.regret for call in calls.calls if call.regret is not None]
    assert len(regrets) > 20 and min(regrets) >= 1.0


def test_every_table_is_read_or_the_one_that_fits() -> None:
    """All of the package by name; for hardware of a class, the one that decides there."""
    every = tables_for(hardware_of(HERE), every=True)
    assert [name for name, _ in every] == sorted(path.stem for path in TABLES.glob("*.json"))
    name, table = every[-1]
    card = hardware_of(table.provenance.environment)
    assert [found for found, _ in tables_for(card, every=False)] == [name]
