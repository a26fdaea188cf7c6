"""The file of a timeline: where it can be written, how large it gets, several ranks in one, and bad input."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.observe.timeline import MIN_EVENTS, RUNNING, Timeline
from layerzero.observe.trace_files import MONOTONIC, WALL, StoredTrace, merge_traces, summarize
from tests.observe.trace_check import check_trace, read_trace, slices

X = torch.randn(2, 16)


def some_trace(path: Path) -> dict[str, Any]:
    """A small trace."""
    with lz.timeline(path):
        for _ in range(3):
            lz.sync.rms_norm(X)
    return read_trace(path)


def with_facts(path: Path, trace: dict[str, Any], **facts: Any) -> Path:
    """The same trace, of another process."""
    (process,) = trace["otherData"]["processes"]
    renamed = [{**event, "pid": facts.get("pid", process["pid"])} for event in trace["traceEvents"]]
    facts = {**trace["otherData"], "processes": [{**process, **facts}]}
    path.write_text(json.dumps({**trace, "traceEvents": renamed, "otherData": facts}))
    return path


# -- where it is written ---------------------------------------------------------------------------------


def made(kind: str, folder: Path) -> Path:
    """A place where no trace can be written."""
    place = folder / kind
    if kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "text":
        place.write_text("a program of somebody's")
    elif kind == "inside a file":
        place.write_text("{}")
        return place / "trace.json"
    return place


@pytest.mark.parametrize("kind", ["folder", "fifo", "text", "inside a file"])
def test_a_place_that_cannot_take_a_trace_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """By the argument's name, before anything runs; what stands there stays, and another one may begin."""
    place = made(kind, tmp_path)
    with pytest.raises(lz.ConfigurationError, match="path needs a place") as caught, lz.timeline(place):
        raise AssertionError("it began")
    assert caught.value.context["field"] == "path" and str(place) in str(caught.value)
    assert RUNNING.timeline is None
    assert kind != "text" or place.read_text() == "a program of somebody's"
    assert kind != "fifo" or stat.S_ISFIFO(place.stat().st_mode)
    some_trace(tmp_path / "next.json")


@pytest.mark.parametrize("path", ["", 3, None, b"x"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    """An empty one, a number, nothing."""
    with pytest.raises(lz.ConfigurationError, match="path needs the path of a file, got"):
        lz.timeline(path)


def test_other_wrong_arguments_are_named(tmp_path: Path) -> None:
    """A bound that is too small or no number, and a keyword that does not exist."""
    with pytest.raises(ValueError, match=f"max_events needs .*{MIN_EVENTS}"):
        lz.timeline(tmp_path / "x.json", max_events=10)
    with pytest.raises(TypeError, match="max_events"):
        lz.timeline(tmp_path / "x.json", max_events="many")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kernel_names"):
        lz.timeline(tmp_path / "x.json", kernel_names=True)  # type: ignore[call-arg]


def test_one_timeline_at_a_time(tmp_path: Path) -> None:
    """A second one is refused and says where the first writes; the first goes on; none runs twice."""
    first = lz.timeline(tmp_path / "first.json")
    with first:
        with pytest.raises(lz.ConfigurationError, match=r"a timeline runs in this process.*first\.json"):
            lz.timeline(tmp_path / "second.json").start()
        lz.sync.rms_norm(X)
    assert slices(read_trace(tmp_path / "first.json"), "thread")
    assert not (tmp_path / "second.json").exists()
    with pytest.raises(lz.ConfigurationError, match="this timeline has run"):
        first.start()


def test_a_block_that_raises_leaves_its_trace(tmp_path: Path) -> None:
    """What failed is what one wants to see; an older trace is replaced, no draft stays."""
    path = tmp_path / "trace.json"
    some_trace(path)
    with pytest.raises(LookupError, match="of the program"), lz.timeline(path):
        lz.sync.layer_norm(X)
        raise LookupError("of the program")
    assert any(".layer_norm." in each["name"] for each in slices(read_trace(path), "thread"))
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_disk_that_fills_up_says_so_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older trace is whole, and nothing stays attached."""
    path = tmp_path / "trace.json"
    some_trace(path)
    before = path.read_bytes()

    def full(self: Path, target: Any) -> Path:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), lz.timeline(path):
        monkeypatch.setattr(Path, "replace", full)
    monkeypatch.undo()
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["trace.json"]
    assert RUNNING.timeline is None


# -- bounded memory --------------------------------------------------------------------------------------


def test_the_oldest_events_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At most so many events, the newest; the trace says how many are missing, the log says it once."""
    path = tmp_path / "trace.json"

    async def crowd() -> None:
        for _ in range(40):
            await asyncio.gather(*(lz.rms_norm(X) for _ in range(16)))

    # Calls that run at once, as times that were learned before may have them, are fewer events.
    settings = lz.Settings(max_inline_us=0)
    with (
        caplog.at_level(logging.INFO, "layerzero"),
        lz.start(settings, scoped=True),
        lz.timeline(path, max_events=MIN_EVENTS) as timeline,
    ):
        asyncio.run(crowd())
        lz.sync.layer_norm(X)
    trace = read_trace(path)
    timed = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert 0 < len(timed) <= MIN_EVENTS
    (process,) = trace["otherData"]["processes"]
    assert process["dropped_events"] == timeline.dropped_events > MIN_EVENTS
    assert process["max_events"] == MIN_EVENTS
    assert any(".layer_norm." in each["name"] for each in slices(trace, "thread"))
    assert sum("timeline.events_dropped" in record.getMessage() for record in caplog.records) == 1


# -- several ranks ---------------------------------------------------------------------------------------


def test_ranks_of_one_machine_are_aligned_by_its_clock(tmp_path: Path) -> None:
    """Times move by the difference of their beginnings, exactly; ranks are processes in their order."""
    trace = some_trace(tmp_path / "a.json")
    begin_ns = trace["otherData"]["processes"][0]["begin_ns"]
    first = with_facts(tmp_path / "r0.json", trace, rank=0)
    late = with_facts(tmp_path / "r1.json", trace, rank=1, begin_ns=begin_ns + 5_000_000, begin_unix_ns=0)
    merged = check_trace(merge_traces([late, first]))
    assert merged["otherData"]["aligned_by"] == MONOTONIC
    assert [(p["pid"], p["rank"]) for p in merged["otherData"]["processes"]] == [(1, 0), (2, 1)]
    by_rank = [[s["ts"] for s in slices(merged, "thread") if s["pid"] == pid] for pid in (1, 2)]
    assert len(by_rank[0]) == 3
    assert all(later - at == pytest.approx(5000.0, abs=1e-6) for at, later in zip(*by_rank, strict=True))


def test_ranks_of_several_machines_are_aligned_by_the_time_of_day(tmp_path: Path) -> None:
    """Another boot's monotonic clock says nothing; merging a merged trace again keeps everybody."""
    trace = some_trace(tmp_path / "a.json")
    facts = trace["otherData"]["processes"][0]
    first = with_facts(tmp_path / "r0.json", trace, rank=0, boot="one", begin_ns=10**18)
    late = with_facts(
        tmp_path / "r1.json", trace, rank=1, boot="two", begin_unix_ns=facts["begin_unix_ns"] + 2_000_000
    )
    both = tmp_path / "both.json"
    both.write_bytes(merge_traces([first, late]))
    merged = read_trace(both)
    assert merged["otherData"]["aligned_by"] == WALL
    by_rank = [[s["ts"] for s in slices(merged, "thread") if s["pid"] == pid] for pid in (1, 2)]
    assert all(later - at == pytest.approx(2000.0, abs=1e-6) for at, later in zip(*by_rank, strict=True))
    third = with_facts(tmp_path / "r2.json", trace, rank=2, boot="two")
    three = check_trace(merge_traces([both, third]))
    assert [p["rank"] for p in three["otherData"]["processes"]] == [0, 1, 2]
    assert len(slices(three, "thread")) == 9


def test_arrows_of_several_ranks_do_not_meet(tmp_path: Path) -> None:
    """Each rank's have numbers of their own."""
    path = tmp_path / "a.json"

    async def crowd() -> None:
        await asyncio.gather(*(lz.rms_norm(X) for _ in range(4)))

    with lz.timeline(path):
        asyncio.run(crowd())
    arrows = [event["id"] for event in read_trace(path)["traceEvents"] if event["ph"] == "s"]
    merged = check_trace(merge_traces([path, path]))
    ids = [event["id"] for event in merged["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) >= 4 and len(ids) == len(set(ids)) == 2 * len(arrows)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"traceEvents": []}', "otherData"),
        (b'{"traceEvents": [], "otherData": {"format": 1, "processes": [{}]}}', "pid"),
        (b'{"traceEvents": [], "otherData": {"format": 1, "processes": []}}', "format"),
        (b'{"traceEvents": [], "otherData": {"format": 99, "processes": []}}', "format 99"),
    ],
    ids=["missing", "empty", "cut off", "somebody else's", "facts", "nobody", "another format"],
)
def test_what_is_no_trace_of_a_timeline_is_refused_by_name(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    """The file and what is wrong with it."""
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(lz.ConfigurationError, match=r"trace\.json needs") as caught:
        merge_traces([path])
    assert why in str(caught.value)
    with pytest.raises(lz.ConfigurationError, match="at least one trace"):
        merge_traces([])


def test_a_summary_says_what_batches_were_like(tmp_path: Path) -> None:
    """Sizes, rows, kernels, reasons by op; and what took longest."""
    path = tmp_path / "trace.json"

    async def crowd() -> None:
        await asyncio.gather(*(lz.rms_norm(X) for _ in range(4)))

    with lz.timeline(path):
        asyncio.run(crowd())
    summary = summarize(StoredTrace(path))
    (batches,) = summary.batches
    assert (batches.op, batches.batches, batches.callers, batches.rows) == ("rms_norm", 1, 4.0, 8.0)
    assert batches.whys == {"turn": 1} and len(batches.kernels) == 1
    assert summary.longest[0].name == batches.kernels[0]


# -- by a setting, and processes -------------------------------------------------------------------------

BY_SETTING = """
import asyncio, os, sys, torch, layerzero as lz
async def main():
    await asyncio.gather(*(lz.rms_norm(torch.ones(1, 8)) for _ in range(3)))
asyncio.run(main())
if sys.argv[1] == "fork" and os.fork() == 0:
    sys.exit(0)
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", ["return", "raise", "fork"])
def test_a_variable_records_a_whole_process(tmp_path: Path, end: str) -> None:
    """Nobody opens or closes anything: the file is there when the process has ended, with its rank's name."""
    variables = {
        **os.environ, "LAYERZERO_TIMELINE": str(tmp_path / "rank{rank}.json"), "RANK": "3",
        "LAYERZERO_PERFDB": "none",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", BY_SETTING, end], capture_output=True, text=True, timeout=240, env=variables
    )
    assert done.returncode == (3 if end == "raise" else 0), done.stderr
    trace = read_trace(tmp_path / "rank3.json")
    assert [batch["args"]["callers"] for batch in slices(trace, "batches")] == [3]
    assert trace["otherData"]["processes"][0]["rank"] == 3


def test_a_setting_records_a_runtime(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From its opening until it closes; a second runtime says that one runs already, and works."""
    path = tmp_path / "trace.json"
    settings = lz.Settings(timeline=str(path))
    with lz.start(settings):
        lz.sync.rms_norm(X)
        with caplog.at_level(logging.WARNING, "layerzero"), lz.start(settings, scoped=True):
            lz.sync.layer_norm(X)
        assert not path.exists() and "timeline.busy" in caplog.text
    names = [each["name"] for each in slices(read_trace(path), "thread")]
    assert any(".rms_norm." in name for name in names) and any(".layer_norm." in name for name in names)
    with pytest.raises(lz.ConfigurationError, match="path needs a place"):
        lz.start(lz.Settings(timeline=str(tmp_path))).__enter__()


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    """It records nothing, and may have a timeline of its own."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, list)
    timeline.start()
    timeline.facts["pid"] = -1  # as a child finds it
    timeline.stop()
    timeline.save()
    assert not path.exists()
