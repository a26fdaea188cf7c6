"""What a wheel carries compiled: where it serves, where it does not, and what is said then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerzero.native import UNAVAILABLE, NativeModule, building, compiling
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

ROOT = Path(__file__).resolve().parents[2]
NAME = "layerzero_noting"  # the smallest module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel's folder of compiled modules, with one in it."""
    if building.compiler() is None:
        pytest.skip("nothing to compile with")
    folder = tmp_path_factory.mktemp("wheel")
    source = building.SOURCES[NAME]
    ((name, flags),) = source.variants().items()
    subprocess.run(building.command(source, flags, folder / name), check=True, timeout=250)
    (folder / building.STAMP).write_text(json.dumps(building.stamp()))
    return folder


@pytest.fixture
def wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """That folder as the installed wheel's, on a machine without a compiler and with an empty cache."""
    built = tmp_path / "built"
    shutil.copytree(folder, built)
    monkeypatch.setattr(building, "SHIPPED", built)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiling._unfit.cache_clear()
    yield built
    compiling._unfit.cache_clear()


def test_a_wheel_s_module_needs_no_compiler(wheel: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded from where it was installed, at once, and nothing is said."""
    library = compiling.library(NAME)
    assert library.ready
    assert library.get().__file__ == str(wheel / f"{NAME}.so")
    assert not library.target().exists() and caplog.records == []


@pytest.mark.parametrize("key", ["torch", "cxx11_abi", "python", "machine", "source of layerzero_hot"])
def test_a_wheel_for_something_else_is_named_once_and_left_alone(
    key: str, wheel: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch, Python, machine or source: a warning says which, and the module is compiled here."""
    stamp = building.stamp()
    (wheel / building.STAMP).write_text(json.dumps({**stamp, key: "another"}))
    library = compiling.library(NAME)
    assert not library.ready
    with pytest.raises(BackendNotAvailableError, match="no-such-compiler"):
        library.get()
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING" and f"{key} 'another'" in said
    assert compiling.WHEEL_UNUSED in said and str(Reason.BACKEND_VERSION_MISMATCH) in said
    monkeypatch.delenv("CXX")
    library.get()
    assert library.target().exists()


@pytest.mark.parametrize(("local", "fits"), [("+cu999", True), ("", True), ("dev1+cpu", False)])
def test_a_wheel_fits_every_build_of_its_torch_release(
    local: str, fits: bool, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU and CUDA builds of one release share their C++; another version does not."""
    release = str(torch.__version__).partition("+")[0]
    monkeypatch.setattr(torch, "__version__", release + local)
    assert (compiling.library(NAME).shipped() is not None) is fits


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_stamp_that_says_nothing_fits_nothing(
    text: str, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, or of another shape."""
    (wheel / building.STAMP).write_text(text)
    assert compiling.library(NAME).shipped() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_wheel_s_module_that_does_not_load_is_named(
    wheel: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled here instead."""
    (wheel / f"{NAME}.so").write_bytes(b"nothing")
    monkeypatch.delenv("CXX")
    compiling.library(NAME).get()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(Reason.KERNEL_LOAD_FAILED) in record.getMessage()


FLAGS = {level: " ".join(sorted(flags)) for level, flags in building.LEVELS.items()}


@pytest.mark.skipif("layerzero_rows.x86-64-v3.so" not in building.SOURCES["layerzero_rows"].variants(),
                    reason="another kind of CPU")  # fmt: skip
@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (f"{FLAGS['x86-64-v3']} {FLAGS['x86-64-v4']}", "x86-64-v4"),
        (FLAGS["x86-64-v3"], "x86-64-v3"),
        (FLAGS["x86-64-v3"].replace("movbe", ""), None),
    ],
)
def test_a_cpu_gets_instructions_that_it_has(
    flags: str, level: str | None, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of what the wheel has for it; without AVX2 nothing, and its own is compiled."""
    for name in building.SOURCES["layerzero_rows"].variants():
        (wheel / name).touch()
    monkeypatch.setattr(building, "cpu_flags", lambda: frozenset(flags.split()))
    shipped = compiling.library("layerzero_rows").shipped()
    assert (shipped.name if shipped else None) == (f"layerzero_rows.{level}.so" if level else None)


def test_no_wheel_is_for_the_cpu_that_it_was_built_on() -> None:
    """Nothing that a wheel carries is compiled for the very CPU there, whatever its instructions are."""
    variants = [variant for source in building.SOURCES.values() for variant in source.variants().items()]
    assert variants and not [name for name, flags in variants if "native" in " ".join(flags)]


def test_a_build_takes_what_was_compiled_from_the_same_by_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the folder that is named, and only that: a module by other flags is compiled."""
    source = building.SOURCES[NAME]
    cache, other = tmp_path / "cache", replace(source, flags=(*source.flags, "-DOTHER"))
    cache.mkdir()
    ((name, flags),) = source.variants().items()
    (cache / source.cached_name(flags)).write_bytes(b"compiled")
    monkeypatch.setattr(building, "compiler", lambda: "no-such-compiler")
    monkeypatch.setenv("LZ_BUILD_CACHE", str(cache))
    monkeypatch.setattr(building, "SOURCES", {NAME: source})
    building.build(tmp_path / "built")
    assert (tmp_path / "built" / name).read_bytes() == b"compiled"
    monkeypatch.setattr(building, "SOURCES", {NAME: other})
    with pytest.raises(FileNotFoundError, match="no-such-compiler"):
        building.build(tmp_path / "again")


def test_every_source_is_in_the_table() -> None:
    """What lies in the package's C++ folders is what a wheel has."""
    folders = {source.source.parent for source in building.SOURCES.values()}
    assert {path for folder in folders for path in folder.glob("*.cpp")} == {
        source.source for source in building.SOURCES.values()
    }


def test_a_python_without_its_lock_is_refused(
    wheel: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a wheel has the module: the reason is said, Python alone serves, no wheel can be built."""
    monkeypatch.setattr(building, "free_threaded", lambda: True)
    with pytest.raises(BackendNotAvailableError, match="free-threaded") as caught:
        compiling.library(NAME).get()
    assert caught.value.context["reason"] is Reason.PYTHON_FREE_THREADED
    hot = NativeModule("noting")
    hot.start()
    assert (hot.module, hot.state, hot.compiled) == (None, UNAVAILABLE, False)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "PYTHON_FREE_THREADED" in record.getMessage()
    assert "free-threaded" in building.unbuildable()


def test_a_free_threaded_build_has_modules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tag is that of the build with the lock; a module of one may not be found by the other."""
    library = compiling.library(NAME)
    before = library.file_name
    monkeypatch.setattr(building, "python_abi", lambda: "cpython-313t-x86_64-linux-gnu")
    assert library.file_name != before


def built(tmp_path: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """What building a wheel out of a copy of this tree says, and the wheels."""
    tree = tmp_path / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with tarfile.open(tmp_path / "tree.tar", "w") as archive:
        for name in listed.stdout.split("\n"):
            if name.startswith(("layerzero", "actors", "scheduler")) or name in BUILD_FILES:
                archive.add(ROOT / name, name)
    with tarfile.open(tmp_path / "tree.tar") as archive:
        archive.extractall(tree, filter="data")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path / "dist")],
        cwd=tree, env={**os.environ, **variables}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    return done, sorted((tmp_path / "dist").glob("*.whl"))


BUILD_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def test_a_build_without_a_compiler_gives_a_wheel_of_python_and_says_so(tmp_path: Path) -> None:
    """One wheel for every platform, with the sources to compile at first use."""
    done, wheels = built(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "without compiled modules" in done.stdout and "no-such-compiler" in done.stdout
    (wheel,) = wheels
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "layerzero/native/hot.cpp" in names and not [name for name in names if name.endswith(".so")]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"LZ_BUILD": "native", "CXX": "no-such-compiler"},
            "LZ_BUILD=native, and the compiled modules cannot",
        ),
        ({"LZ_BUILD": "fast"}, "LZ_BUILD needs auto, native or pure, got 'fast'"),
    ],
)
def test_a_build_that_insists_or_is_told_nonsense_fails(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    """No wheel is made that somebody would take for another."""
    done, wheels = built(tmp_path, **variables)
    assert done.returncode != 0 and said in done.stderr and wheels == []


def test_the_sources_say_themselves_that_they_need_the_lock(tmp_path: Path) -> None:
    """Compiled by hand for a free-threaded Python they are refused by the compiler, whatever loads them."""
    if building.compiler() is None:
        pytest.skip("nothing to compile with")
    for name in ("layerzero_hot", NAME):
        command = building.command(
            building.SOURCES[name], ("-E", "-std=c++20", "-DPy_GIL_DISABLED"), tmp_path / "out"
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert "counts on the lock" in done.stderr
