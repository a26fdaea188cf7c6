"""Files of every version of every format of ours, as they were written then, are read now as the newest."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero._util import record_store
from layerzero.graphs.proof import ProofStore
from layerzero.health import JsonQuarantineStore
from layerzero.perfdb import shipped
from layerzero.perfdb.rows import SCHEMA as PERFDB_SCHEMA
from layerzero.perfdb.store import read_rows
from layerzero.selection import dispatch_table
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.selection.policy import load as policy_load
from layerzero.selection.policy import load_policy
from layerzero.spec import capability_overlays, settings
from layerzero.spec.errors import CacheCorruptionError, ConfigurationError
from layerzero.warmup import Manifest, manifest

FILES = Path(__file__).parents[1] / "data" / "formats"
# By the name of its files: the newest version, and what reads one.
FORMATS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "dispatch_table": (dispatch_table.FORMAT, DispatchTable.load),
    "shipped_table": (shipped.FORMAT, shipped.read_table),
    "capabilities": (capability_overlays.FORMAT, capability_overlays.read),
    "manifest": (manifest.FORMAT, Manifest.load),
    "policy": (policy_load.FORMAT_VERSION, load_policy),
    "settings": (settings.FORMAT_VERSION, lz.Settings.load),
    "quarantine": (record_store.SCHEMA, lambda path: JsonQuarantineStore(path).load()),
    "graph_proof": (record_store.SCHEMA, lambda path: ProofStore(path).load()),
    "perfdb": (PERFDB_SCHEMA, read_rows),
}


def copied(name: str, version: int, folder: Path) -> Path:
    """The stored file or folder of one version, where it may be touched."""
    (found,) = FILES.glob(f"{name}_{version}*")
    target = folder / found.name
    shutil.copytree(found, target) if found.is_dir() else shutil.copy(found, target)
    return target


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_each_version_is_kept(name: str) -> None:
    """Who makes another version stores a file of it: from 1 to the newest none is missing."""
    newest, _ = FORMATS[name]
    kept = {path.stem.rpartition("_")[2] for path in FILES.glob(f"{name}_*")}
    assert kept == {str(version) for version in range(1, newest + 1)}


@pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in FORMATS for version in range(1, FORMATS[name][0] + 1)]
)
def test_every_version_is_read(name: str, version: int, tmp_path: Path) -> None:
    """Nothing is refused, set aside or lost."""
    path = copied(name, version, tmp_path)
    assert FORMATS[name][1](path)
    assert not list(tmp_path.rglob("*.damaged-*"))


def test_points_of_an_older_dispatch_table_stand_for_what_they_stood_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A point of the grid becomes the range of the sizes that it stood for; the event says which format."""
    caplog.set_level(logging.INFO)
    for version in (1, 2):
        table = DispatchTable.load(copied("dispatch_table", version, tmp_path))
        assert [bucket.ranges for bucket in table.buckets] == [
            {"N": (13, 16), "C": (64, 64)}, {"N": (193, 256), "C": (64, 64)},
        ]  # fmt: skip
        bucket = table.buckets[0]
        assert (bucket.cost_source, bucket.expected_us, bucket.costs) == (
            "measured", 100.0, {"quick.rms_norm": 100.0},
        )  # fmt: skip
        assert table.date.startswith("2026-11-2") and table.limits == {"*": "0" * 64}
        assert any(f"format={version} now=3" in r.getMessage() for r in caplog.records)
        table.save(again := tmp_path / f"again_{version}.json")
        assert DispatchTable.load(again) == table


def test_older_rows_and_records_keep_what_they_said(tmp_path: Path) -> None:
    """Times, dates, findings and reasons of then."""
    old, new = (shipped.read_table(copied("shipped_table", v, tmp_path)) for v in (1, 2))
    assert old == new and old.rows[0].timestamp == 1790000000 and old.rows[0].case.op == "rms_norm"
    for version in (1, 2):
        (record,) = JsonQuarantineStore(copied("quarantine", version, tmp_path)).load()
        assert (record.why, record.timestamp, record.device) == ("wrong numbers", 1790000000.0, "*")
        (proof,) = ProofStore(copied("graph_proof", version, tmp_path)).load()
        assert proof.safe and proof.timestamp == 1790000000.0


def test_limits_of_older_capabilities_are_the_same_limits(tmp_path: Path) -> None:
    """Each limit that was a record then is the condition that today's file has."""
    old, new = (capability_overlays.read(copied("capabilities", v, tmp_path)) for v in (1, 2))
    assert old.kernels.keys() == new.kernels.keys() and old.version == new.version == 2
    spelled = [text for entry in old.kernels.values() for text in entry.capability.limits]
    assert (
        any("%" in t for t in spelled) and any("==" in t for t in spelled) and any("*" in t for t in spelled)
    )
    for kernel, entry in old.kernels.items():
        assert entry.capability.limits == new.kernels[kernel].capability.limits, kernel


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_table_that_was_altered_is_refused(version: int, tmp_path: Path) -> None:
    """The hash of then is checked before anything is made of it."""
    for name, error in (("dispatch_table", CacheCorruptionError), ("shipped_table", CacheCorruptionError)):
        path = copied(name, version, tmp_path)
        path.write_text(path.read_text().replace("quick.rms_norm", "other.rms_norm", 1))
        with pytest.raises(error, match="do not match its content hash"):
            FORMATS[name][1](path)
    path = copied("capabilities", 1, tmp_path)
    path.write_text(path.read_text().replace('"alignment": 16', '"alignment": 32', 1))
    with pytest.raises(CacheCorruptionError, match="content hash"):
        capability_overlays.read(path)


@pytest.mark.parametrize("text", ['{"type": "Nothing", "dim": "D"}', '{"dim": "D"}', '"D <= 8"', "7"])
def test_what_was_no_limit_is_none(text: str, tmp_path: Path) -> None:
    """An overlay of format 1 with something else among its limits is refused, by kernel."""
    path = tmp_path / "overlay.yaml"
    path.write_text(
        f"version: 1\nkernels:\n  torch.rms_norm.native:\n    capability:\n      limits: [{text}]\n"
    )
    with pytest.raises(ConfigurationError, match=r"torch\.rms_norm\.native: limits need"):
        capability_overlays.load_overlay(path, [])


def test_a_first_record_that_was_altered_is_set_aside(tmp_path: Path) -> None:
    """Its checksum is looked at before it is rewritten; the kernel stays out of service everywhere."""
    folder = copied("quarantine", 1, tmp_path)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"device":"*"', b'"device":"x"'))
    (record,) = JsonQuarantineStore(folder).load()
    assert "unreadable" in record.why and list(folder.glob("*.damaged-1"))
