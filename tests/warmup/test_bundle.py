"""Bundles between machines: what one compiled, proved, measured and decided is there on the next one like it.

Machines are folders here, and FlashInfer and Triton their caches' files: no card is needed to carry them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero._util import files
from layerzero.api.graphs import record_finding
from layerzero.backends.flashinfer import common
from layerzero.graphs.verdict import CaptureFinding, CaptureProblem
from layerzero.measure.calls import call, tensor
from layerzero.measure.tuning import publish, stored_rows
from layerzero.native import building
from layerzero.native.compiling import library
from layerzero.perfdb import BenchmarkCase, Measurement
from layerzero.spec.hardware import Hardware, hypothetical_gpu
from layerzero.spec.reasons import Reason
from layerzero.warmup import archive
from layerzero.warmup.bundle import (
    InstallRecord,
    Records,
    environment_of,
    read_bundle,
    receipts,
    write_bundle,
)
from tests.kernels import kernel

KEY = "B" * 52
FLASHINFER = "0.7.2.post1"
CARD = hypothetical_gpu(90)
MANIFEST = lz.Manifest(critical=(call("layer_norm", x=tensor(3, 8)),))
KERNEL = "torch.layer_norm.native"


class Machine:
    """A home of its own: every cache in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        folder.mkdir(mode=0o700)

    def here(self) -> Machine:
        """Let this be the machine that runs."""
        for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
            self._monkeypatch.setenv(name, str(self.folder / name.lower()))
        return self

    def files(self) -> dict[str, bytes]:
        """Everything that it has, by path."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def put(self, name: str, data: bytes) -> Path:
        """A file on it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
        return path


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that has compiled: a module of FlashInfer's, a Triton kernel, one of our own."""
    installed = tmp_path / "site" / f"flashinfer_python-{FLASHINFER}.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {FLASHINFER}\n"
    )
    monkeypatch.syspath_prepend(str(installed.parent))
    machine = Machine(tmp_path / "first", monkeypatch).here()
    ops = f"flashinfer_workspace_base/.cache/flashinfer/{FLASHINFER}/90a/cached_ops"
    machine.put(f"{ops}/norm/norm.so", b"\x7fELF norm")
    machine.put(f"{ops}/norm/norm.cuda.o", b"an object")
    machine.put(f"{ops}/tmp/norm.lock", b"")
    cache = f"triton_cache_dir/{KEY}"
    cubin = machine.put(f"{cache}/rows.cubin", b"\x7fELF rows")
    machine.put(f"{cache}/rows.json", b"{}")
    machine.put(f"{cache}/__grp__rows.json", json.dumps({"child_paths": {"rows.cubin": str(cubin)}}).encode())
    machine.put("triton_cache_dir/notes.txt", b"no kernel")
    native = library("layerzero_hot").target().name
    machine.put(f"xdg_cache_home/layerzero/native/{native}", b"\x7fELF hot")
    return machine


@pytest.fixture
def second(first: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One with nothing yet."""
    return Machine(tmp_path / "second", monkeypatch)


def bundle_of(machine: Machine, path: Path, hardware: Hardware = CARD, **records: Any) -> str:
    """What a machine writes; its digest."""
    machine.here()
    return write_bundle(path, hardware, Records(**records))[0]


def test_the_next_machine_has_what_the_first_compiled(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    """Each kernel is where its library looks for it, with the paths of this machine, for this user alone."""
    path = tmp_path / "b.lzb"
    digest = bundle_of(first, path, manifest=MANIFEST)
    second.here()
    bundle = read_bundle(path, CARD, sha256=digest)
    assert bundle.records.manifest == MANIFEST and second.files() == {}, "reading writes nothing"
    installed = bundle.install()
    assert len(installed.written) == 5 and not (*installed.same, *installed.unchanged, *installed.replaced)
    native = library("layerzero_hot").target().name
    cubin = second.folder / "triton_cache_dir" / KEY / "rows.cubin"
    assert second.files() == {
        f"xdg_cache_home/layerzero/flashinfer/{FLASHINFER}/90a/norm/norm.so": b"\x7fELF norm",
        f"xdg_cache_home/layerzero/native/{native}": b"\x7fELF hot",
        f"triton_cache_dir/{KEY}/rows.cubin": b"\x7fELF rows",
        f"triton_cache_dir/{KEY}/rows.json": b"{}",
        f"triton_cache_dir/{KEY}/__grp__rows.json": msgspec.json.encode(
            {"child_paths": {"rows.cubin": str(cubin)}}
        ),
    }
    for folder in second.folder.rglob("*"):
        if folder.is_dir():
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    again = read_bundle(path, CARD).install()
    assert len(again.same) == 5 and not again.written
    assert bundle_of(second, tmp_path / "c.lzb", manifest=MANIFEST) == digest, "it can be passed on"


@pytest.mark.parametrize("field", sorted(environment_of(CARD, for_this_cpu=True)))
def test_a_bundle_of_another_environment_is_refused_by_name(
    first: Machine, second: Machine, tmp_path: Path, field: str
) -> None:
    """Driver, card, CUDA, torch, Python, libraries, version, instructions: the field, wanted, got."""
    stated = environment_of(CARD, for_this_cpu=True)
    got = stated[field]
    path = tmp_path / "b.lzb"
    archive.write_archive(path, {**stated, field: "another"}, {})
    second.here()
    with pytest.raises(lz.BundleRefusedError) as caught:
        read_bundle(path, CARD)
    (problem,) = caught.value.problems
    assert problem.reason is Reason.BUNDLE_ENVIRONMENT_DIFFERS
    assert (problem.field, problem.needs, problem.got) == (field, "another", got)
    assert second.files() == {}


def test_every_difference_is_told_at_once(first: Machine, tmp_path: Path) -> None:
    """Fields that are unknown here or missing there are differences, too."""
    stated = environment_of(CARD, for_this_cpu=False)
    del stated["torch"]
    path = tmp_path / "b.lzb"
    archive.write_archive(path, {**stated, "moon": "full", "driver": "1.0"}, {})
    with pytest.raises(lz.BundleRefusedError) as caught:
        read_bundle(path, CARD)
    assert [(p.field, p.needs, p.got) for p in caught.value.problems] == [
        ("driver", "1.0", "580.0"),
        ("moon", "full", "no such field"),
        ("torch", "nothing stated", torch.__version__),
    ]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("native/layerzero_hot-" + "0" * 32 + ".so", b"x", Reason.BUNDLE_ENVIRONMENT_DIFFERS),
        (f"triton/{KEY}/__grp__a.json", b'{"child_paths": {"a": "/etc/passwd"}}', Reason.BUNDLE_DAMAGED),
        (f"triton/{KEY}/__grp__a.json", b'{"child_paths": {"../a": "../a"}}', Reason.BUNDLE_DAMAGED),
        (f"triton/{KEY}/__grp__a.json", b"not JSON", Reason.BUNDLE_DAMAGED),
        ("proofs.json", b'[{"kernel": 3}]', Reason.BUNDLE_DAMAGED),
        ("measurements.json", b"{}", Reason.BUNDLE_DAMAGED),
        ("dispatch_table.json", b"{}", Reason.BUNDLE_DAMAGED),
        ("manifest.json", b'{"critical": [], "format": 99}', Reason.BUNDLE_DAMAGED),
    ],
)
def test_a_member_that_does_not_hold_is_refused_before_anything_is_written(
    first: Machine, second: Machine, tmp_path: Path, name: str, data: bytes, reason: Reason
) -> None:
    """A record that does not decode, a list that leads elsewhere, a library of other sources."""
    path = tmp_path / "b.lzb"
    good = {f"triton/{KEY}/rows.cubin": b"x"}
    archive.write_archive(path, environment_of(CARD, for_this_cpu=False), {**good, name: data})
    second.here()
    with pytest.raises(lz.BundleRefusedError) as caught:
        read_bundle(path, CARD)
    assert [(p.reason, p.field) for p in caught.value.problems] == [(reason, name)]
    assert second.files() == {}


def test_a_file_that_differs_is_kept_and_named(
    first: Machine, second: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is overwritten in silence; `replace` overwrites, and says so."""
    path = tmp_path / "b.lzb"
    bundle_of(first, path)
    name = f"triton_cache_dir/{KEY}/rows.cubin"
    there = second.here().put(name, b"compiled here")
    with caplog.at_level(logging.WARNING, "layerzero"):
        installed = read_bundle(path, CARD).install()
    assert installed.unchanged == (str(there),) and there.read_bytes() == b"compiled here"
    assert [m.split()[0] for m in caplog.messages] == ["bundle.file_kept"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "layerzero"):
        installed = read_bundle(path, CARD).install(replace=True)
    assert installed.replaced == (str(there),) and there.read_bytes() == b"\x7fELF rows"
    assert [m.split()[0] for m in caplog.messages] == ["bundle.file_replaced"]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of POSIX")
@pytest.mark.parametrize("exposed", [f"triton_cache_dir/{KEY}", "triton_cache_dir"])
def test_no_code_goes_into_a_folder_that_others_can_write(
    first: Machine, second: Machine, tmp_path: Path, exposed: str
) -> None:
    """Another user could exchange it there before it runs, or the folder that it is in."""
    path = tmp_path / "b.lzb"
    bundle_of(first, path)
    folder = second.here().folder / "triton_cache_dir" / KEY
    folder.mkdir(parents=True)
    (second.folder / exposed).chmod(0o777)
    with pytest.raises(PermissionError, match="writable by no other user"):
        read_bundle(path, CARD).install()
    assert list(folder.iterdir()) == []


def test_a_bundle_is_written_where_no_cache_folder_can_be(first: Machine, tmp_path: Path) -> None:
    """A home that cannot be written to has compiled nothing, and its measurements go into a bundle."""
    first.here()
    (first.folder / "xdg_cache_home").rename(tmp_path / "gone")
    (first.folder / "xdg_cache_home").write_text("no folder")
    _, names = write_bundle(tmp_path / "b.lzb", CARD, Records())
    assert names and not any(name.startswith("native/") for name in names)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="links of POSIX")
def test_a_link_in_the_place_of_a_file_is_not_followed(
    first: Machine, second: Machine, tmp_path: Path
) -> None:
    """What it leads to stays as it is, with `replace` too."""
    path = tmp_path / "b.lzb"
    bundle_of(first, path)
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    link = second.here().folder / "triton_cache_dir" / KEY / "rows.cubin"
    link.parent.mkdir(parents=True, mode=0o700)
    link.symlink_to(precious)
    assert read_bundle(path, CARD).install().unchanged == (str(link),)
    read_bundle(path, CARD).install(replace=True)
    assert precious.read_bytes() == b"mine" and not link.is_symlink()


def test_flashinfer_takes_what_was_carried(
    first: Machine, second: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader looks into our folder for its version and architectures, where that is ours alone."""
    bundle_of(first, path := tmp_path / "b.lzb")
    second.here()
    read_bundle(path, CARD).install()
    ours = second.folder / "xdg_cache_home" / "layerzero" / "flashinfer" / FLASHINFER / "90a"

    def used(archs: str, packaged: bool = False) -> Path:
        """The folder that it looks into for modules that need no compiler."""
        folder = tmp_path / f"aot-{packaged}"
        if packaged:
            folder.mkdir()
        workspace = second.folder / ".cache" / "flashinfer" / FLASHINFER / archs
        environment = SimpleNamespace(FLASHINFER_AOT_DIR=folder, FLASHINFER_WORKSPACE_DIR=workspace)
        monkeypatch.setitem(sys.modules, "flashinfer.jit.env", environment)
        common._use_carried.__wrapped__()
        return environment.FLASHINFER_AOT_DIR  # type: ignore[no-any-return]

    assert used("90a") == ours and (ours / "norm" / "norm.so").is_file()
    assert used("100a") != ours
    ours.chmod(0o777)
    assert used("90a") != ours
    ours.chmod(0o700)
    assert used("90a", packaged=True) != ours


def test_triton_finds_what_was_carried(first: Machine, second: Machine, tmp_path: Path) -> None:
    """Its own cache gives a kernel's files, at this machine's paths."""
    cache = pytest.importorskip("triton.runtime.cache", reason="Triton's own cache is asked")
    key = hashlib.sha256(b"a kernel").hexdigest()
    files = {"add.cubin": b"code", "add.json": b"{}", "add.ptx": b"text"}
    there = cache.get_cache_manager(key)
    there.put_group("add.json", {name: there.put(data, name) for name, data in files.items()})
    bundle_of(first, path := tmp_path / "b.lzb")
    second.here()
    assert cache.get_cache_manager(key).get_group("add.json") is None
    read_bundle(path, CARD).install()
    found = cache.get_cache_manager(key).get_group("add.json")
    assert {name: Path(at).read_bytes() for name, at in found.items()} == files
    assert all(Path(at).is_relative_to(second.folder) for at in found.values())


# -- the public functions, on the CPU that is here ---------------------------------------------------------


@pytest.fixture
def states(first: Machine, tmp_path: Path) -> Iterator[Path]:
    """A folder for the states of runtimes."""
    yield tmp_path


def opened(state: Path) -> Any:
    """A runtime with a state of its own."""
    settings = lz.Settings(warm="off", device="cpu", state_dir=str(state), shipped_tables=False)
    return lz.start(settings, scoped=True)


def measured(median: float) -> Measurement:
    """One row that somebody measured."""
    case = BenchmarkCase(op="layer_norm", dtype="float32", dims=(("C", 8), ("N", 3)))
    return Measurement(
        case=case, kernel=KERNEL, median_us=median, p95_us=median, variance=0.0, samples=9, timestamp=1
    )


UNSAFE = (CaptureFinding(CaptureProblem.ALLOCATED_OUTSIDE, "16 bytes"),)


def saved(states: Path, path: Path) -> Any:
    """The bundle of a runtime that has proved, measured and decided."""
    with opened(states / "state-1") as runtime:
        device = runtime.device()
        record_finding(device, KERNEL, "float32 C8", ())
        record_finding(device, KERNEL, "float32 C9", UNSAFE)
        publish(device, [measured(2.0), measured(3.0)])
        lz.solve(states / "table.json")
        lz.configure(dispatch_table=str(states / "table.json"))
        return lz.save_bundle(path, MANIFEST)


def test_proofs_measurements_and_decisions_are_known_on_the_next_machine(
    second: Machine, states: Path
) -> None:
    """They are in force in the process that reads them, and in the ones after it."""
    told = saved(states, path := states / "b.lzb")
    assert told.proofs == 1 and told.measurements == 2 and told.manifest == MANIFEST
    second.here()
    with opened(states / "state-2") as runtime:
        report = lz.load_bundle(path, sha256=told.sha256)
        device = runtime.device()
        assert (report.proofs, report.measurements) == (1, 2)
        proof = device.proofs.proof_of(device.registry.get(KERNEL))
        assert proof is not None and proof.cases == {"float32 C8": (), "float32 C9": UNSAFE}
        assert {row.median_us for row in stored_rows(device)} == {2.0, 3.0}
        assert device.dispatch_table is not None and not device.dispatch_table.refusal
        assert report.dispatch_table == runtime.settings.dispatch_table
        again = lz.load_bundle(path)
        assert (again.proofs, again.measurements) == (0, 0)
    with opened(states / "state-2") as runtime:
        device = runtime.device()
        assert device.proofs.proof_of(device.registry.get(KERNEL)) == proof
        assert len(stored_rows(device)) == 2


def test_decisions_for_other_kernels_are_refused_before_anything_is_written(
    second: Machine, states: Path
) -> None:
    """A table that would decide nothing here is no part of this environment."""
    saved(states, path := states / "b.lzb")
    second.here()
    with opened(states / "state-2") as runtime:
        runtime.add_kernel(kernel("mine.layer_norm"))
        with pytest.raises(lz.BundleRefusedError) as caught:
            lz.load_bundle(path)
    assert [(p.reason, p.field) for p in caught.value.problems] == [
        (Reason.BUNDLE_ENVIRONMENT_DIFFERS, "kernels")
    ]
    assert second.files() == {}


def test_what_this_machine_found_itself_counts_before_a_bundle(second: Machine, states: Path) -> None:
    """A proof from elsewhere does not make a kernel safe that failed here; other cases are taken over."""
    saved(states, path := states / "b.lzb")
    second.here()
    with opened(states / "state-2") as runtime:
        device = runtime.device()
        record_finding(device, KERNEL, "float32 C8", UNSAFE)
        lz.load_bundle(path)
        proof = device.proofs.proof_of(device.registry.get(KERNEL))
        assert proof is not None and proof.cases == {"float32 C8": UNSAFE, "float32 C9": UNSAFE}


def test_a_warm_up_reads_a_bundle_and_its_calls(second: Machine, states: Path) -> None:
    """Awaited or not: the bundle's own calls are warmed, and readiness names it."""
    told = saved(states, path := states / "b.lzb")
    second.here()
    with opened(states / "state-2"):
        report = asyncio.run(lz.warmup(bundle=path, sha256=told.sha256))
        assert report.ready and [str(c) for c in MANIFEST.critical] == [w.call for w in report.critical]
        assert report.bundle is not None and report.bundle.sha256 == told.sha256
        readiness = lz.readiness_check()
        assert readiness and readiness.bundles == (told.sha256,)
        assert lz.warmup_blocking([], bundle=path).critical == ()
        with pytest.raises(TypeError, match="needs a manifest or a bundle, got neither"):
            lz.warmup_blocking()
        with pytest.raises(TypeError, match="sha256 needs the bundle"):
            lz.warmup_blocking(MANIFEST, sha256="0" * 64)
        with pytest.raises(lz.BundleRefusedError) as caught:
            lz.warmup_blocking(bundle=path, sha256="0" * 64)
        assert [p.reason for p in caught.value.problems] == [Reason.BUNDLE_UNTRUSTED]


def test_the_doctor_tells_what_came_from_a_bundle(second: Machine, states: Path) -> None:
    """Each bundle with its digest, its counts, and the files that are gone or altered since."""
    hot = library("layerzero_hot").target()
    data = hot.read_bytes()
    told = saved(states, path := states / "b.lzb")
    second.here()
    with opened(states / "state-2"):
        report = lz.load_bundle(path)
        here = library("layerzero_hot").target()
        assert str(here) in report.written and here.read_bytes() == data
        (receipt,) = receipts()
        assert (receipt.sha256, receipt.proofs, receipt.measurements) == (told.sha256, 1, 2)
        assert receipt.files[str(here)] == hashlib.sha256(data).hexdigest() and receipt.altered() == ()
        here.write_bytes(b"another")
        examined = lz.doctor(imports=False)
        (shown,) = examined.bundles
        assert shown.altered() == (str(here),)
        assert told.sha256[:16] in str(examined) and "1 files are gone or altered since" in str(examined)


def test_the_last_bundle_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By when they came, not by their digests; what is no receipt is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = files.own_user_folder("bundles")
    for name, moment in (("a", 2.0), ("b", 3.0), ("c", 1.0)):
        (folder / f"{name}.json").write_bytes(
            msgspec.json.encode(InstallRecord(sha256=name, path="p", timestamp=moment))
        )
    (folder / "d.json").write_text("{")
    assert [receipt.sha256 for receipt in receipts()] == ["b", "a", "c"]


def test_what_does_not_outlive_the_process_is_said(second: Machine, states: Path) -> None:
    """Without a folder of state, and without a file of measurements."""
    saved(states, path := states / "b.lzb")
    second.here()
    settings = lz.Settings(warm="off", device="cpu", perfdb=None, dispatch_table=str(states / "table.json"))
    with lz.start(settings, scoped=True):
        notes = lz.load_bundle(path).notes
    assert [note.split()[0] for note in notes] == ["proofs", "measurements", "its"]


def test_a_cpu_states_its_instructions(first: Machine, tmp_path: Path) -> None:
    """Code for this very CPU is carried from CPU to CPU alone, and only to one like it."""
    with opened(tmp_path / "state") as runtime:
        here = runtime.device().hardware
    assert "cpu" in environment_of(here, for_this_cpu=True)
    path = tmp_path / "b.lzb"
    write_bundle(path, here, Records())
    assert "cpu" in archive.read_archive(path).head.environment
    bundle_of(first, path)
    assert "cpu" not in archive.read_archive(path).head.environment
    assert {building.SOURCES[name].name for name in building.SOURCES} >= {"layerzero_hot"}
