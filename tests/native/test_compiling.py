"""The builder: what a library's name depends on, and what it says when it cannot be made."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.native import FAST_PATH, READY, UNAVAILABLE, UNUSED, NativeModule, building, compiling
from layerzero.native.compiling import CppModule, cache_folder
from layerzero.spec.errors import BackendNotAvailableError
from tests.children import Child
from tests.users import NOBODY, needs_root


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> compiling.CppModule:
    """A library of one small source, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_text("int small() { return 1; }\n")
    return compiling.CppModule("small", source, ("-O1",), levelled=True)


def test_the_name_depends_on_what_the_library_depends_on(
    library: compiling.CppModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine, torch, flag, source or header is another library; the folder is the user's alone."""
    names = {library.file_name, replace(library, flags=("-O2",)).file_name}
    library.source.with_name("beside.h").write_text("// new\n")
    names.add(library.file_name)
    library.source.write_text("int small() { return 2; }\n")
    names.add(library.file_name)
    monkeypatch.setattr(platform, "machine", lambda: "another")
    names.add(library.file_name)
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(library.file_name)
    assert len(names) == 6
    assert library.target().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "a.cpp: In function f:\na.cpp:3: error: no x\ncollect2: error: ld returned 1 exit status",
            "a.cpp:3",
        ),
        (
            "/usr/bin/ld: final link failed: No space left on device\ncollect2: error: ld returned 1",
            "/usr/bin/ld",
        ),
        ("collect2: error: ld returned 1 exit status", "collect2"),
        ("Killed\nmore", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_a_compilers_own_reason_is_told(said: str, told: str) -> None:
    """Of a link that fails it is what the linker said, not that it failed."""
    assert compiling.first_error(said).startswith(told)


WAITING = """
import sys, threading
from pathlib import Path
from layerzero._util import ending
from layerzero.actors.device.worker import Worker
from layerzero.native import compiling

library = compiling.CppModule("small", Path(sys.argv[1]), ("-O1",))
worker, waits = Worker("worker-waiting"), threading.Event()

def wait():
    waits.set()
    try:
        library.get()
    except compiling.BackendNotAvailableError as error:
        print(error.context["reason"], error)

with compiling.file_lock(library.target().with_suffix(".lock")):
    worker.submit(wait)
    assert waits.wait(60)
    print(ending.end(60))
"""


def test_a_process_that_ends_does_not_wait_for_anothers_compiler(
    library: compiling.CppModule, tmp_path: Path
) -> None:
    """Who waits for the lock of a process that compiles gives up when its own process ends."""
    done = Child(WAITING, str(library.source), folder=tmp_path).ended()
    told = "native code: not compiled: another process compiles, and this one ends"
    assert done.stdout.splitlines() == [f"JIT_FAILED {told}", "True"], done.stderr


@pytest.mark.skipif("platform.machine() != 'x86_64'", reason="another kind of CPU")
def test_a_cpu_gets_the_library_that_a_wheel_has_for_it(
    library: compiling.CppModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each level, one without for a CPU that has none; one that is for every CPU depends on none."""
    all_levels = [frozenset(), *[*building.LEVELS.values()][::-1]]
    flags, names, portable = [], [], replace(library, levelled=False)
    for has in (frozenset[str]().union(*all_levels[: place + 1]) for place in range(len(all_levels))):
        monkeypatch.setattr(building, "cpu_flags", lambda has=has: has)
        flags.append(library.variant()[1])
        names.append((library.file_name, portable.file_name))
    assert flags == [("-O1",), ("-O1", "-march=x86-64-v3"), ("-O1", "-march=x86-64-v4")]
    assert len({name for name, _ in names}) == 3 and len({name for _, name in names}) == 1


def test_without_a_compiler_everything_stays_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state and one warning say what is missing, `load` raises it, and nothing was taken up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    adopted: list[Any] = []
    hot = NativeModule()
    hot.on_ready(adopted.append)
    assert hot.state == UNUSED
    hot._load()
    assert hot.state == UNAVAILABLE and "no-such-compiler" in hot.detail
    assert hot.module is None and adopted == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "BACKEND_MISSING" in record.getMessage()
    with pytest.raises(BackendNotAvailableError, match="no-such-compiler"):
        hot.load()


def test_the_switch_leaves_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAYERZERO_NATIVE=off: nothing is loaded and nothing compiled."""
    monkeypatch.setenv("LAYERZERO_NATIVE", "off")
    hot = NativeModule()
    hot.start()
    assert (hot.state, hot.module) == ("off", None)


def test_who_comes_late_is_told_at_once() -> None:
    """Adopters hear of a module that is there already, and of its being put aside."""
    seen: list[Any] = []
    hot = NativeModule()
    module = object()
    hot.use(module)
    hot.on_ready(seen.append)
    hot.use(None)
    assert seen == [module, None] and FAST_PATH.state in (READY, "off", UNUSED, UNAVAILABLE)


@pytest.mark.parametrize("folder", ["layerzero", "layerzero/native"])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who can put a library there would run code as this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder).chmod(0o777)
    with pytest.raises(BackendNotAvailableError, match=r"code is loaded from.*writable by no other user"):
        cache_folder()


@needs_root
def test_another_users_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even out of this user's folder, where it lay before the folder was closed to others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = CppModule("planted", tmp_path / "planted.cpp", ())
    (tmp_path / "planted.cpp").touch()
    target = library.target()
    target.write_bytes(b"")
    os.chown(target, NOBODY, NOBODY)
    with pytest.raises(BackendNotAvailableError, match=f"does not load.*got owner {NOBODY}"):
        library.get()


def refuses(module: Any) -> None:
    """An adopter that finds something missing in the module."""
    if module is not None:
        raise AttributeError("no such slot")


def test_a_module_that_one_adopter_refuses_is_used_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Who had taken it up gives it back, the state says why, and a warning does."""
    seen: list[Any] = []
    hot = NativeModule()
    hot.on_ready(seen.append)
    hot.on_ready(refuses)
    hot.on_ready(seen.append)
    module = object()
    with pytest.raises(AttributeError, match="no such slot"):
        hot.use(module)
    assert (hot.module, hot.state, hot.detail) == (None, UNAVAILABLE, "no such slot")
    assert seen == [module, None, None]
    assert [(record.levelname, "no such slot" in record.getMessage()) for record in caplog.records] == [
        ("WARNING", True)
    ]


def test_nobody_keeps_a_refused_module_where_giving_it_back_fails_for_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that cannot give it back is named, and those after it are asked all the same."""
    seen: list[Any] = []

    def stuck(module: Any) -> None:
        raise RuntimeError("never") if module is None else AttributeError("no such slot")

    hot = NativeModule()
    hot.on_ready(stuck)
    hot.on_ready(seen.append)
    with pytest.raises(AttributeError, match="no such slot"):
        hot.use(object())
    assert (hot.module, hot.state, seen) == (None, UNAVAILABLE, [None])
    assert [("no such slot" in r.getMessage(), "never" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_a_module_is_ready_when_every_adopter_has_it() -> None:
    """The state that others read does not run ahead of them."""
    states: list[str] = []
    hot = NativeModule()
    hot.on_ready(lambda module: states.append(hot.state))
    hot.use(object())
    assert (states, hot.state) == ([UNUSED], READY)


def test_a_late_adopter_that_refuses_puts_the_module_aside() -> None:
    """Also where the module was in use before."""
    seen: list[Any] = []
    hot = NativeModule()
    hot.on_ready(seen.append)
    hot.use("module")
    hot.on_ready(refuses)
    assert (hot.module, hot.state, seen) == (None, UNAVAILABLE, ["module", None])
