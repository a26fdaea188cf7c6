"""Small files of state: whole or not at all, bounded, set aside under a name of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerzero._util import files
from tests import children
from tests.users import NOBODY, needs_root, planted, shared
from tests.waiting import LIMIT_S

__all__ = ["shared"]


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    """A file replaces its forerunner, in a folder that only this user can enter."""
    path = tmp_path / "state" / "a.json"
    for data in (b"first", b"second"):
        files.write_whole(path, data)
        assert files.read_bounded(path, 6) == data
    assert os.listdir(path.parent) == ["a.json"]
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("named", ["", "cache", "./cache", "~/cache"])
def test_a_cache_folder_that_is_relative_counts_for_nothing(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the XDG specification wants: it would be another folder in each working directory."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert files.user_folder("shared") == Path("/home/somebody/.cache/layerzero/shared")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert files.user_folder("shared") == Path("/elsewhere/layerzero/shared")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old file nor the folder shows a trace of it."""
    path = tmp_path / "a.json"
    files.write_whole(path, b"first")

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_whole(path, b"second")
    assert files.read_bounded(path, 10) == b"first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_and_a_large_file_are_not_read(tmp_path: Path) -> None:
    """Somebody else's link does not choose what is read; a bound is a bound."""
    files.write_whole(tmp_path / "a", b"12345")
    with pytest.raises(ValueError, match="more than 4 bytes"):
        files.read_bounded(tmp_path / "a", 4)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        files.read_bounded(tmp_path / "link", 5)


def test_damaged_files_keep_apart(tmp_path: Path) -> None:
    """Each one set aside gets a name of its own, also where another process was quicker."""
    found = []
    for data in (b"x", b"y"):
        files.write_whole(tmp_path / "a", data)
        found.append(files.set_aside(tmp_path / "a"))
    assert [path.name for path in found] == ["a.damaged-1", "a.damaged-2"]
    assert [path.read_bytes() for path in found] == [b"x", b"y"]
    assert not files.set_aside(tmp_path / "a").exists()


@pytest.mark.parametrize("there", [b"root:x:0:0\n", b'{"other": []}', b"[1]"])
def test_another_kind_of_file_is_not_replaced(tmp_path: Path, there: bytes) -> None:
    """What somebody named by mistake stays as it was; nor is a neighbour with a draft's name touched."""
    path = tmp_path / "a.json"
    path.write_bytes(there)
    with pytest.raises(FileExistsError, match="no file with 'rows'"):
        files.replace_own(path, b'{"rows": []}', "rows")
    with pytest.raises(FileExistsError):
        files.replace_own(tmp_path, b'{"rows": []}', "rows")
    assert path.read_bytes() == there
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_of_ours_is_replaced(tmp_path: Path) -> None:
    """So is an empty one; a failed write leaves what was there."""
    path, neighbour = tmp_path / "new" / "a.json", tmp_path / "new" / "a.tmp"
    neighbour.parent.mkdir()
    for there in (b"", b'{"rows": [1]}'):
        neighbour.write_bytes(b"mine")
        path.write_bytes(there)
        files.replace_own(path, b'{"rows": [2]}', "rows")
        assert path.read_bytes() == b'{"rows": [2]}'
    with pytest.raises(TypeError):
        files.replace_own(path, "no bytes", "rows")  # type: ignore[arg-type]
    assert path.read_bytes() == b'{"rows": [2]}'
    assert sorted(os.listdir(path.parent)) == ["a.json", "a.tmp"]
    assert neighbour.read_bytes() == b"mine"


# -- other users ----------------------------------------------------------------------------------------


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    """So are those around it that are missing; a default place that others could read is closed to them."""
    files.own_folder(tmp_path / "a" / "b" / "c")
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "a").chmod(0o755)
    files.own_folder(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    files.own_folder(tmp_path / "a", default=True)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files.own_folder(tmp_path / "link", default=True)  # this user's own


@pytest.mark.parametrize("default", [False, True])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, default: bool) -> None:
    """What lies there may be anybody's; nothing is read from it, and nothing is put there."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(PermissionError, match=r"writable by no other user, got owner \d+ and mode 777"):
        files.own_folder(tmp_path / "state", default=default)
    with pytest.raises(PermissionError):
        files.write_whole(tmp_path / "state" / "a.json", b"{}")
    assert os.listdir(tmp_path / "state") == []


@needs_root
def test_what_another_user_made_is_refused(shared: Path) -> None:
    """Its folder, its link to a folder of this user, its file, its link at the place of a file."""
    mine = shared / "mine"
    files.own_folder(mine)
    (mine / "a.json").write_bytes(b"mine")

    def plant() -> None:
        (shared / "folder").mkdir(mode=0o700)
        (shared / "link").symlink_to(mine)
        (shared / "file").write_bytes(b"theirs")
        (shared / "to-file").symlink_to(mine / "a.json")

    planted(shared, plant)
    for name in ("folder", "link"):
        with pytest.raises(PermissionError, match=f"{NOBODY}.*{name}"):
            files.own_folder(shared / name, default=True)
    with pytest.raises(PermissionError, match=f"got owner {NOBODY}"):
        files.read_bounded(shared / "file", 10)
    for name in ("file", "to-file"):
        with pytest.raises(OSError):
            files.pinned_path(shared / name)
        with pytest.raises(FileExistsError):
            files.create_own(shared / name)
    assert (mine / "a.json").read_bytes() == b"mine"


def test_a_held_file_is_the_one_that_was_checked(tmp_path: Path) -> None:
    """Whatever takes its name later: a library is loaded from what was found to be this user's."""
    path = tmp_path / "library.so"
    path.write_bytes(b"checked")
    held = files.pinned_path(path)
    (tmp_path / "other").write_bytes(b"planted")
    (tmp_path / "other").replace(path)
    assert Path(held).read_bytes() == (b"planted" if held == str(path) else b"checked")
    assert held != str(path) or not os.path.exists("/proc/self/fd")


# -- pipes and depths -----------------------------------------------------------------------------------

READERS = {
    "settings": "layerzero.spec.settings:Settings.load",
    "policy": "layerzero.selection.policy:load_policy",
    "hub": "layerzero.backends.hub.repository:_read",
    "deployment": "layerzero.cli.deployment:load",
    "workload": "layerzero.measure.calls:Workload.load",
    "warmup": "layerzero.warmup.manifest:Manifest.load",
    "dispatch table": "layerzero.selection.dispatch_table:DispatchTable.load",
    "shipped table": "layerzero.perfdb.shipped:read_table",
    "capabilities": "layerzero.spec.capability_overlays:read",
    "state": "tests.util.test_files:state",
}
# A process for each: a deep file may end it, and a pipe hold it until its alarm.
READ = """
import importlib, operator, os, signal, sys
from pathlib import Path
limit_s, *asked = sys.argv[1:]
readers = {}
for text in asked[::2]:
    module, _, name = text.partition(":")
    readers[text] = operator.attrgetter(name)(importlib.import_module(module))
for number, (text, path) in enumerate(zip(asked[::2], asked[1::2])):
    if os.fork():
        continue
    signal.alarm(int(limit_s))
    try:
        readers[text](Path(path))
    except Exception as error:
        os.write(1, f"{number} {type(error).__name__} {error}".replace(chr(10), " ").encode() + b"\\n")
    os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
UNITS = {"lists": b"[", "objects": b'{"a":'}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """The error of each reader at a pipe, and at each kind of deep file; none where it raised none."""
    folder = tmp_path_factory.mktemp("odd")
    os.mkfifo(folder / "pipe")
    for name, unit in UNITS.items():
        (folder / name).write_bytes(unit * 100_000)
    asked = [(reader, kind) for reader in READERS.values() for kind in ("pipe", *UNITS)]
    words = [word for reader, kind in asked for word in (reader, str(folder / kind))]
    done = children.run(READ, str(int(LIMIT_S)), *words, folder=folder)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return {each: said.get(str(number), "") for number, each in enumerate(asked)}


def state(path: Path) -> object:
    """A record of state."""
    return files.decode_json(files.read_bounded(path, 1 << 20), dict[str, object])


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_a_pipe_at_a_files_place_is_an_error_at_once(
    reader: str, refusals: dict[tuple[str, str], str]
) -> None:
    """Nobody writes into it: who opened it as a file would wait for ever."""
    said = refusals[reader, "pipe"]
    assert "no plain file" in said, said


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_deep_nesting_is_an_error_that_is_expected(
    reader: str, kind: str, refusals: dict[tuple[str, str], str]
) -> None:
    """A hundred thousand brackets are no reason to leave by another error than damage has."""
    said = refusals[reader, kind]
    assert said and not said.startswith("RecursionError"), said


def test_a_folder_at_a_files_place_is_named(tmp_path: Path) -> None:
    """By its path: the error that Python makes of a folder's descriptor names a number."""
    for read in (files.read_given, files.read_bounded):
        with pytest.raises(IsADirectoryError) as refused:
            read(tmp_path, 9)
        assert refused.value.filename == str(tmp_path)


def test_what_cannot_be_written_is_named_as_the_caller_did(tmp_path: Path) -> None:
    """Not by the name of the draft beside it, which nobody asked for."""
    path = tmp_path / ("n" * 250)  # with what a draft's name has more, too long for a file's name
    with pytest.raises(OSError) as refused:
        files.put_whole(path, b"{}")
    assert refused.value.filename == str(path)
