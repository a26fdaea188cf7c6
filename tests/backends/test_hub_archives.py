"""Archives of hub kernels and the folder they go to: what was locked is taken, else all is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from layerzero.backends.hub import Hub, archive
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from tests.backends.test_hub import REPOSITORY, Shelf
from tests.children import Child


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A folder with one repository and its lock file."""
    return Shelf(tmp_path)


def files_only(shelf: Shelf, packed: bool = True) -> Path:
    """An archive of the shelf's files."""
    path = shelf.folder.parent / "kernels.tar"
    with tarfile.open(path, "w:gz" if packed else "w") as file:
        for each in sorted(p for p in shelf.folder.rglob("*") if p.is_file()):
            file.add(each, each.relative_to(shelf.folder).as_posix())
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


@pytest.mark.parametrize("packed", [True, False])
def test_an_archive_of_what_was_locked_is_taken(shelf: Shelf, packed: bool) -> None:
    """Its files are in the folder afterwards, in place of what was there."""
    path = files_only(shelf, packed)
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    hub.folder.mkdir()
    (hub.folder / REPOSITORY).mkdir(parents=True)
    (hub.folder / REPOSITORY / "old.py").touch()
    assert hub.unpack(path) == [hub.verified(REPOSITORY)] == [hub.folder / REPOSITORY]


def holes() -> tarfile.TarInfo:
    """A locked name whose content is a hole: bytes that no archive holds, without a bound."""
    info = member(f"{REPOSITORY}/build/torch-cpu/__init__.py")
    info.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(4 << 20)}
    return info


ATTACKS: list[tuple[str, Callable[[], tuple[tarfile.TarInfo, bytes]], str]] = [
    ("symlink", lambda: (member(f"{REPOSITORY}/build/x", tarfile.SYMTYPE, "/etc/passwd"), b""), "is a link"),
    ("hardlink", lambda: (member(f"{REPOSITORY}/build/x", tarfile.LNKTYPE, "/etc/passwd"), b""), "is a link"),
    ("device", lambda: (member(f"{REPOSITORY}/build/x", tarfile.CHRTYPE), b""), "is no plain file"),
    ("fifo", lambda: (member(f"{REPOSITORY}/build/x", tarfile.FIFOTYPE), b""), "is no plain file"),
    ("holes", lambda: (holes(), b""), "holds what the archive does not"),
    ("absolute", lambda: (member("/etc/evil", size=1), b"x"), "is no <owner>/<name>"),
    ("upward", lambda: (member("../../evil", size=1), b"x"), "is no <owner>/<name>"),
    ("inside", lambda: (member(f"{REPOSITORY}/../../evil", size=1), b"x"), "is not in the lock file"),
    ("surplus", lambda: (member(f"{REPOSITORY}/build/more.py", size=1), b"x"), "is not in the lock file"),
    ("stranger", lambda: (member("evil/code/build/x", size=1), b"x"), "is not on the allow list"),
]  # fmt: skip


@pytest.mark.parametrize(("attack", "words"), [pytest.param(make, w, id=name) for name, make, w in ATTACKS])
def test_an_archive_with_anything_else_is_refused_whole(
    shelf: Shelf,
    attack: Callable[[], tuple[tarfile.TarInfo, bytes]],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Links, devices, pipes, absolute and upward paths, files that are not locked: nothing is written.

    An event tells why, and how many were refused before.
    """
    with tarfile.open(shelf.folder.parent / "attack.tar", "w") as file:
        for each in sorted(p for p in shelf.folder.rglob("*") if p.is_file()):
            file.add(each, each.relative_to(shelf.folder).as_posix())
        info, content = attack()
        file.addfile(info, io.BytesIO(content))
    path = shelf.folder.parent / "attack.tar"
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    with pytest.raises(BackendNotAvailableError, match=words):
        hub.unpack(path)
    assert not hub.folder.exists() and not (shelf.folder.parent / "evil").exists()
    (told,) = [text for each in caplog.records if "hub.refused" in (text := each.getMessage())]
    assert words in told and re.search(r"refused=[1-9]", told)


def test_a_bomb_a_cut_archive_and_another_byte_are_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpacking stops at the bound; a file that is there twice is none either."""
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    path = shelf.folder.parent / "bomb.tar.gz"
    name = f"{REPOSITORY}/build/torch-cpu/__init__.py"
    with gzip.open(path, "wb") as file:
        file.write(member(name, size=8 << 20).tobuf(tarfile.PAX_FORMAT) + bytes(8 << 20))
    with pytest.raises(BackendNotAvailableError, match="holds more than 1048576 bytes"):
        hub.unpack(path)
    whole = files_only(shelf).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BackendNotAvailableError, match="ends in the middle"):
        hub.unpack(path)
    members = gzip.decompress(whole).rstrip(b"\0")
    members += bytes(-len(members) % 512)
    path.write_bytes(members * 2 + bytes(1024))
    with pytest.raises(BackendNotAvailableError, match="is there twice"):
        hub.unpack(path)
    code = shelf.variant / "__init__.py"
    code.write_bytes(code.read_bytes() + b"#")
    with pytest.raises(BackendNotAvailableError, match="is not what was locked"):
        hub.unpack(files_only(shelf))
    assert not hub.folder.exists()


def headers(kind: bytes, content: bytes, count: int = 1, size: bytes | None = None) -> bytes:
    """Headers that describe the next file, as they lie in an archive; `size` as their field says it."""
    head = bytearray(member("described", kind, size=len(content)).tobuf(tarfile.USTAR_FORMAT))
    if size is not None:
        head[124:136] = size
    head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * ord(" ") + sum(head[156:512]))
    return (bytes(head) + content + bytes(-len(content) % 512)) * count


NEXT = f"{REPOSITORY}/build/torch-cpu/__init__.py"
CHAINS: list[tuple[str, bytes, str]] = [
    ("pax headers in a row", headers(b"x", b"12 path=a/b\n", 4000), "one header of each kind"),
    ("long names in a row", headers(b"L", b"a/b\0", 4000), "one header of each kind"),
    ("a long pax header", headers(b"x", b"7000000 comment=" + bytes(7 << 20)), "at most 65536 bytes"),
    ("a long name", headers(b"L", b"a" * (7 << 20)), "at most 65536 bytes"),
    ("a size below zero", headers(b"0", b"", size=b"\xff" * 12), "octal digits"),
    ("a pax header's size below zero", headers(b"x", b"", size=b"\xff" * 10 + b"\xfe\x00"), "octal digits"),
    ("a size in signs", headers(b"0", b"", size=b"-0000000001\0"), "octal digits"),
    ("a size below zero for the next", headers(b"x", b"14 size=-1024\n"), "'size'"),
    ("a list of holes", headers(b"x", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"), "holes"),
    ("holes of old", headers(b"S", b""), "holes"),
    ("a record longer than its header", headers(b"x", b"99 path=a/b\n"), "holds no records"),
    ("a record of no length", headers(b"x", b"0 path=a/b\n"), "holds no records"),
    ("a name for all", headers(b"g", b"12 path=a/b\n"), "holds for all files"),
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("chain", "words"), [pytest.param(c, w, id=name) for name, c, w in CHAINS])
def test_headers_without_bound_or_below_zero_are_refused(
    shelf: Shelf, chain: bytes, words: str, packed: bool
) -> None:
    """Chains of headers, long ones, sizes below zero, lists of holes: one error, no endless loop."""
    path = shelf.folder.parent / "chain.tar"
    whole = files_only(shelf, packed=False).read_bytes()
    path.write_bytes(gzip.compress(chain + whole, 1) if packed else chain + whole)
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    with pytest.raises(BackendNotAvailableError, match=words):
        hub.unpack(path)
    assert not hub.folder.exists()


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_are_read_in_each_format(shelf: Shelf, kind: int) -> None:
    """As Python's and GNU's tar write them, and as a name in two parts; a pipe is no archive."""
    folder = shelf.variant / ("deep" * 20)
    folder.mkdir()
    (folder / ("name" * 10)).write_text("x")
    shelf.lock()
    path = shelf.folder.parent / "long.tar"
    with tarfile.open(path, "w", format=kind) as file:
        file.pax_headers = {"comment": "of all"} if kind == tarfile.PAX_FORMAT else {}
        for each in sorted(p for p in shelf.folder.rglob("*") if p.is_file()):
            file.add(each, each.relative_to(shelf.folder).as_posix())
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    assert hub.unpack(path) == [hub.verified(REPOSITORY)]
    os.mkfifo(path.with_suffix(".pipe"))
    with pytest.raises(BackendNotAvailableError, match="no plain file"):
        hub.unpack(path.with_suffix(".pipe"))


# -- the folder -------------------------------------------------------------------------------------------


def test_what_is_unpacked_goes_through_no_link(shelf: Shelf) -> None:
    """Neither at the owner's place nor at the repository's: what is elsewhere stays as it was."""
    path, elsewhere = files_only(shelf), shelf.folder.parent / "elsewhere"
    (elsewhere / "norms").mkdir(parents=True)
    (elsewhere / "norms" / "mine").touch()
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    hub.folder.mkdir()
    (hub.folder / "acme").symlink_to(elsewhere)
    with pytest.raises(BackendNotAvailableError, match="cannot be written"):
        hub.unpack(path)
    assert [p.name for p in elsewhere.rglob("*")] == ["norms", "mine"]
    (hub.folder / "acme").unlink()
    (hub.folder / "acme").mkdir()
    (hub.folder / REPOSITORY).symlink_to(elsewhere / "norms")
    assert hub.unpack(path) == [hub.verified(REPOSITORY)]
    assert [p.name for p in elsewhere.rglob("*")] == ["norms", "mine"]


_UNPACK = """
import sys
from pathlib import Path
from layerzero.backends.hub import Hub
folder, lockfile, archive, name, go = sys.argv[1:]
hub = Hub(folder, lockfile, allow=[name])
Path(go, str(__import__("os").getpid())).touch()
while len(list(Path(go).iterdir())) < 4:
    pass
for _ in range(150):
    hub.unpack(archive)
"""


def test_processes_that_unpack_at_once_all_do(shelf: Shelf) -> None:
    """Each time one of them may find the other's folder where it puts its own."""
    here, go = shelf.folder.parent / "here", shelf.folder.parent / "go"
    here.mkdir()
    go.mkdir()
    given = (str(here), str(shelf.lockfile), str(files_only(shelf)), REPOSITORY, str(go))
    all_of_them = [Child(_UNPACK, *given, folder=shelf.folder.parent) for _ in range(4)]
    ended = [each.ended() for each in all_of_them]
    assert [each.returncode for each in ended] == [0, 0, 0, 0], ended
    assert Hub(here, shelf.lockfile, allow=[REPOSITORY]).verified(REPOSITORY) == here / REPOSITORY
    assert [path.name for path in here.iterdir()] == ["acme"]


@pytest.mark.parametrize("path", ["build/../../../evil.py", "/etc/evil", "build//x", "build/", ""])
def test_a_lock_file_that_leads_elsewhere_is_refused(shelf: Shelf, path: str) -> None:
    """Its paths are where files are written: by name, in the folder, or not at all."""
    entries = json.loads(shelf.lockfile.read_text())
    entries[0]["files"][path] = "0" * 64
    shelf.lockfile.write_text(json.dumps(entries))
    with pytest.raises(ConfigurationError, match="lockfile needs paths inside the repository"):
        shelf.hub()
