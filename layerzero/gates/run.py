"""A gate from its file to its verdict: stages, waivers, artifacts, one report as JSON and as a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from layerzero._util.files import pretty_json, put_whole
from layerzero._util.version import VERSION
from layerzero.gates.artifacts import digests, write_artifacts
from layerzero.gates.outcome import GateReport, StageOutcome, check_waivers, excuse, unused_waivers
from layerzero.gates.release_file import Release
from layerzero.gates.stages import StageRunner
from layerzero.report.page import page_of, write_page
from layerzero.runtime import Runtime

JSON_NAME, PAGE_NAME, REPORT_NAME = "gate.json", "gate.html", "{stage}_report_latest.json"


def run_gate(
    release: Release,
    suite: str,
    runtime: Runtime,
    *,
    artifacts: str | os.PathLike[str] | None = None,
    begun: Callable[[str], None] = lambda stage: None,
) -> GateReport:
    """Run a suite's stages; with `artifacts`, a folder gets what the release keeps, and the report.

    `begun(stage)` is called as each stage begins.
    Raises: ReleaseFileError: the file has no such suite. OSError: the folder cannot be written.
    """
    stages = release.stages_of(suite)
    begun_at = datetime.now(UTC)
    today = begun_at.date()
    runner = StageRunner(runtime, release.folder)
    outcomes: list[StageOutcome] = []
    for name, stage in stages.items():
        begun(name)
        outcomes.append(excuse(runner.run(name, stage), release.waivers, today))
    notes = unused_waivers(release.waivers, outcomes)
    hashes: tuple[tuple[str, str], ...] = ()
    folder = None if artifacts is None else Path(artifacts)
    if folder is not None:
        begun("artifacts")
        notes += tuple(write_artifacts(runtime, folder))
        hashes = tuple(each for each in digests(folder) if each[0] not in (JSON_NAME, PAGE_NAME))
    hardware = runtime.device().hardware
    report = GateReport(
        title=f"{Path(release.path).name}, suite {suite}, layerzero {VERSION}",
        suite=suite,
        written_at=begun_at.isoformat(timespec="seconds"),
        machine=f"{platform.node()}, {hardware.name}, {hardware.platform}, torch {hardware.torch}",
        stages=(*outcomes, check_waivers(release.waivers, today)),
        waivers=release.waivers,
        notes=notes,
        artifacts=hashes,
    )
    if folder is not None:
        for outcome in outcomes:
            put_whole(folder / REPORT_NAME.format(stage=outcome.stage), pretty_json(outcome))
        put_whole(folder / JSON_NAME, pretty_json(report.as_plain()))
        write_page(folder / PAGE_NAME, page_of(report.as_plain()))
    return report
