"""Warming up makes calls ready: real compilations by a real compiler, seen by the interpreter's events."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.api.warmup import warmup_blocking
from layerzero.measure.calls import Call, Workload, call, tensor
from layerzero.native.compiling import cache_folder
from layerzero.ops import table as ops_table
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.reasons import Reason
from layerzero.warmup import Manifest, manifest_of, watching
from tests.kernels import kernel

REFERENCE = ops_table.get("rms_norm").reference
COMPILER = __import__("shutil").which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a real compilation needs g++, which is missing")


def norm(rows: int) -> Call:
    """A norm of so many rows."""
    return call("rms_norm", x=tensor(rows, 32, dtype="float32"), weight=tensor(32, dtype="float32"))


def keep_what_is_compiled(folder: Path) -> None:
    """Let a cache folder find our own C++ parts made: compiling them is no test's affair here."""
    native = folder / "layerzero" / "native"
    if not native.exists():
        native.parent.mkdir()
        native.symlink_to(cache_folder())


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[lz.Runtime]:
    """A runtime that loads nothing by itself, with a cache folder of its own."""
    keep_what_is_compiled(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def cold(name: str, load: Any, **more: Any) -> Any:
    """A kernel that would win, once loaded."""
    return kernel(f"{name}.rms_norm", load=load, launch_us=0.01, rank=1, cold=True, **more)


def compiles(folder: Path) -> Any:
    """A load that compiles a library with g++ unless the folder has it, as a vendor's compiler would."""

    def load() -> Any:
        library = folder / "made.so"
        if not library.exists():
            source = folder / "made.cpp"
            source.write_text('extern "C" int answer() { return 42; }')
            subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        import ctypes

        assert ctypes.CDLL(str(library)).answer() == 42
        return REFERENCE

    return load


@needs_compiler
@pytest.mark.asyncio
async def test_the_first_request_after_it_compiles_and_loads_nothing(
    runtime: lz.Runtime, tmp_path: Path
) -> None:
    """The monitor sees g++ during the warm-up, and neither a compiler nor a library afterwards."""
    runtime.add_kernel(cold("made", compiles(tmp_path)))
    report = await lz.warmup(Manifest(critical=(norm(4),)))
    assert report.ready and report.compiled >= 1
    assert [w.kernel for w in report.critical] == ["made.rms_norm"]
    x, weight = torch.randn(4, 32), torch.ones(32)
    with watching() as monitor:
        lz.sync.rms_norm(x, weight)
        await lz.rms_norm(x, weight)
    assert monitor.events == []
    selection = lz.last_selection()
    assert selection is not None and selection.kernel == "made.rms_norm"
    assert lz.readiness_check().cold_calls == 0


@needs_compiler
def test_without_it_the_monitor_sees_the_compilation(runtime: lz.Runtime, tmp_path: Path) -> None:
    """The control: the same load outside a warm-up is noticed."""
    runtime.add_kernel(cold("made", compiles(tmp_path)))
    with watching() as monitor:
        runtime.device().warm(["made.rms_norm"])
    assert next(Path(e.what).name for e in monitor.compiled) == "g++"
    assert any(e.what.endswith("made.so") for e in monitor.loaded)
    with watching() as later:
        pass
    assert later.events == []


@needs_compiler
def test_where_nothing_may_compile_the_compiler_does_not_begin(runtime: lz.Runtime, tmp_path: Path) -> None:
    """The load ends with an error before its compiler's process is there, and leaves no library."""
    runtime.add_kernel(cold("made", compiles(tmp_path)))
    with watching(forbid=True) as monitor:
        runtime.device().warm(["made.rms_norm"])
    assert len(monitor.compiled) == 1 and not monitor.loaded
    assert list(tmp_path.rglob("made.so")) == []


def test_critical_calls_come_first_and_the_others_go_on_behind(runtime: lz.Runtime) -> None:
    """The report is there while the others wait; progress counts them all."""
    gate, seen = threading.Event(), list[str]()

    def load() -> Any:
        assert gate.wait(60)
        return REFERENCE

    runtime.add_kernel(cold("slow", load, limits=()))
    layer = call("layer_norm", x=tensor(4, 32, dtype="float32"), weight=tensor(32, dtype="float32"))
    manifest = Manifest(critical=(layer,), others=(norm(2), norm(3)))
    report = warmup_blocking(
        manifest, progress=lambda done, total, w: seen.append(f"{done}/{total} {w.call[:5]}")
    )
    assert report.ready and report.pending == 2 and seen == ["1/3 layer"]
    standing = lz.readiness_check()
    assert not standing and standing.pending == 2 and any("not warmed yet" in p for p in standing.problems)
    gate.set()
    assert warmup_blocking(Manifest(critical=(norm(2),)), whole=True).ready
    while lz.readiness_check().pending:
        threading.Event().wait(0.01)
    assert [s.split()[0] for s in seen] == ["1/3", "2/3", "3/3"]
    assert lz.readiness_check()


def test_a_late_call_is_served_by_what_is_ready(runtime: lz.Runtime) -> None:
    """After the time limit calls run on the ready kernel; the compilation goes on."""
    gate = threading.Event()

    def load() -> Any:
        assert gate.wait(60)
        return REFERENCE

    runtime.add_kernel(cold("slow", load))
    report = warmup_blocking([norm(4)], timeout_s=0.05)
    assert [w.state for w in report.critical] == ["late"] and not report.ready
    lz.sync.rms_norm(torch.randn(4, 32), torch.ones(32))
    selection = lz.last_selection()
    assert (
        selection is not None
        and selection.kernel != "slow.rms_norm"
        and selection.when_warm == "slow.rms_norm"
    )
    gate.set()


def test_a_kernel_that_does_not_compile_is_tried_once(runtime: lz.Runtime) -> None:
    """Its failure blocks it with the reason; the call is ready on another kernel."""
    tries: list[int] = []

    def load() -> Any:
        tries.append(1)
        raise RuntimeError("error: expected ';' before '}'")

    runtime.add_kernel(cold("broken", load))
    report = warmup_blocking(Manifest(critical=(norm(4), norm(5)), others=(norm(6),)), whole=True)
    assert report.ready and len(tries) == 1
    assert {w.kernel for w in (*report.critical, *report.others)} != {"broken.rms_norm"}
    assert runtime.device().registry.blocked()["broken.rms_norm"].reason is Reason.KERNEL_LOAD_FAILED
    lz.sync.rms_norm(torch.randn(9, 32), torch.ones(32))
    assert len(tries) == 1 and lz.readiness_check()


def test_a_call_that_nobody_warmed_is_a_cold_call(runtime: lz.Runtime) -> None:
    """The gate counts choices made for requests, not those of the warm-up."""
    assert not lz.readiness_check() and "nothing was warmed up" in lz.readiness_check().problems[0]
    warmup_blocking([norm(4)])
    lz.sync.rms_norm(torch.randn(4, 32), torch.ones(32))
    assert lz.readiness_check().cold_calls == 0
    lz.sync.layer_norm(torch.randn(4, 32))
    assert lz.readiness_check().cold_calls == 1


def test_a_quarantined_kernel_is_no_longer_ready(runtime: lz.Runtime) -> None:
    """Readiness is asked of the present, not of the warm-up."""
    (warmed,) = warmup_blocking([norm(4)]).critical
    assert lz.readiness_check()
    runtime.quarantine(warmed.kernel, "a test says so")
    standing = lz.readiness_check()
    assert not standing and "QUARANTINED" in standing.problems[0]


def test_a_call_whose_arguments_are_wrong_fails_alone(runtime: lz.Runtime) -> None:
    """Its record holds the error and readiness says it; the next call is made ready."""
    wrong = call("rms_norm", x=tensor(4, 32, dtype="float32"), weight=tensor(31, dtype="float32"))
    report = warmup_blocking([wrong, norm(4)])
    assert [w.state for w in report.critical] == ["failed", "ready"] and "weight" in report.critical[0].error
    (problem,) = lz.readiness_check().problems
    assert str(wrong) in problem and "weight" in problem


@pytest.mark.parametrize("saved", [Manifest(critical=(norm(1),)), Workload((norm(1),))])
def test_what_is_saved_replaces_its_own_kind_alone(saved: Manifest | Workload, tmp_path: Path) -> None:
    """A mistyped path costs no file, and no pipe is waited for."""
    path = tmp_path / "m.json"
    for _ in range(2):
        saved.save(path)
    assert type(saved).load(path) == saved
    for other in (tmp_path / "thesis.txt", Path("/dev/null")):
        if not other.exists():
            other.write_text("years of work")
        with pytest.raises(FileExistsError, match="not replaced"):
            saved.save(other)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_manifest_survives_its_file_and_names_its_content(tmp_path: Path) -> None:
    """The version is a digest of the calls; damage and other formats are named."""
    manifest = Manifest(critical=(norm(1),), others=(norm(2),), name="a")
    manifest.save(tmp_path / "m.json")
    assert manifest_of(tmp_path / "m.json") == manifest
    assert manifest.version == Manifest(critical=(norm(1),), others=(norm(2),), name="b").version
    for critical, others in (((2,), (1,)), ((1,), (3,)), ((1, 2), ())):
        other = Manifest(critical=tuple(map(norm, critical)), others=tuple(map(norm, others)))
        assert manifest.version != other.version
    seen = Workload((norm(1), Call("rms_norm", norm(2).args, 9)))
    assert Manifest.of(seen, critical=1).critical[0].count == 9
    for text in (
        "{",
        '{"critical": [], "nonsense": 1}',
        *(f'{{"critical": [], "format": {number}}}' for number in (0, 99)),
    ):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"m\.json"):
            Manifest.load(tmp_path / "m.json")


def test_a_model_gives_a_manifest_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a small Llama's decode step is made ready, the smallest batch first."""
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
              "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    manifest = Manifest.of_model(tmp_path, rows=(1, 3), dtype="float32")
    assert len(manifest.critical) == len(manifest.others) == 10
    monkeypatch.setenv("LAYERZERO_DENY", "native.*,zentorch.*")  # compiling them is another test's affair
    with lz.start(lz.Settings.load(warm="off", device="cpu"), scoped=True):
        report = warmup_blocking(manifest, whole=True)
    made = (*report.critical, *report.others)
    assert len(made) == 20 and {w.state for w in made} == {"ready"}, [w.error for w in made]
    with pytest.raises(ConfigurationError, match=r"model_type needs one of .*llama.*, got 'bert'"):
        Manifest.of_model({"model_type": "bert"})


def test_what_is_no_manifest_is_told_with_what_is_needed(tmp_path: Path) -> None:
    """Of a file that holds something else, of a folder, and of what is no workload."""
    path = tmp_path / "manifest.json"
    for text in ("hello", "[1]", "{}", ""):
        path.write_text(text)
        with pytest.raises(
            lz.ConfigurationError, match=r"manifest\.json: needs a manifest, as Manifest\.save"
        ):
            lz.Manifest.load(path)
    with pytest.raises(lz.ConfigurationError, match=f"{tmp_path}.*Is a directory"):
        lz.Manifest.load(tmp_path)
    with pytest.raises(TypeError, match="workload needs a recorded workload"):
        lz.Manifest.of(3)  # type: ignore[arg-type]
    config = {"model_type": "llama"}
    for rows in (3, (0,), (), (1.5,)):
        with pytest.raises((ValueError, TypeError), match=r"^rows needs"):
            lz.Manifest.of_model(config, rows=rows)  # type: ignore[arg-type]
