"""A bundle's file: what is no whole, plain, listed archive is refused by name before it is used."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.spec.reasons import Reason
from layerzero.warmup import archive
from layerzero.warmup.archive import FORMAT, HEAD, read_archive, write_archive

KEY = "A" * 52
MEMBERS = {
    f"triton/{KEY}/rows.cubin": b"code" * 50,
    "flashinfer/0.7.2/90a/norm/norm.so": b"\x7fELF" + bytes(range(200)),
    "manifest.json": b"{}",
}
ENVIRONMENT = {"torch": "2.13"}


def listed(contents: dict[str, bytes], /, **changes: Any) -> bytes:
    """The head of these members, with other fields where they are given."""
    entries = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(contents.items())
    ]
    return msgspec.json.encode({"format": FORMAT, "environment": ENVIRONMENT, "members": entries} | changes)


def packed(path: Path, files: list[tuple[str | zipfile.ZipInfo, bytes]], **options: Any) -> Path:
    """A zip of these files, in this order."""
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, data in files:
            file.writestr(name, data)
    path.chmod(0o600)
    return path


def with_member(name: str | zipfile.ZipInfo, data: bytes = b"x") -> list[tuple[str | zipfile.ZipInfo, bytes]]:
    """A head and one member that it names."""
    plain = name if isinstance(name, str) else name.filename
    return [(HEAD, listed({plain: data})), (name, data)]


def link(name: str) -> zipfile.ZipInfo:
    """A symbolic link as zip archives carry it."""
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return info


def refusal(path: Path, **options: Any) -> Any:
    """The one problem that a bundle is refused for."""
    with pytest.raises(lz.BundleRefusedError) as caught:
        read_archive(path, **options)
    assert caught.value.path == str(path) and str(path) in str(caught.value)
    (problem,) = caught.value.problems
    return problem


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Members, environment and digest come back; equal contents are equal files."""
    path = tmp_path / "b.lzb"
    digest = write_archive(path, ENVIRONMENT, MEMBERS)
    read = read_archive(path, sha256=digest.upper())
    assert read.sha256 == digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read.head.environment == ENVIRONMENT
    assert {m.name: read.read(m) for m in read.head.members} == MEMBERS
    assert read.find("manifest.json") == b"{}" and read.find("proofs.json") is None
    assert write_archive(tmp_path / "again.lzb", ENVIRONMENT, dict(reversed(MEMBERS.items()))) == digest


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name",
    [
        "/etc/cron.d/x", "../../.bashrc", f"triton/{KEY}/../../x", f"triton/{KEY}/a/b", f"triton/{KEY}/.x",
        "triton/short/x", "flashinfer/0.7.2/90a/norm/other.so", "flashinfer/../90a/norm/norm.so",
        "native/hot.so", "native/../x-0123456789abcdef0123456789abcdef.so", "setup.py", "manifest.json\n",
        "C:\\x", f"triton/{KEY}/x\\y", "flashinfer/0.7.2/90a/norm/", HEAD,
    ],
)  # fmt: skip
def test_a_name_that_is_none_of_a_bundle_is_refused(tmp_path: Path, name: str) -> None:
    """Absolute, upward, unknown, hidden and repeated names never become a path."""
    path = packed(tmp_path / "b.lzb", with_member(name))
    assert refusal(path).reason in (Reason.BUNDLE_UNSAFE, Reason.BUNDLE_DAMAGED)


@pytest.mark.parametrize(
    ("files", "reason", "field"),
    [
        (lambda: with_member(link("manifest.json"), b"/etc/passwd"), Reason.BUNDLE_UNSAFE, "manifest.json"),
        (lambda: [], Reason.BUNDLE_FORMAT, "first member"),
        (lambda: [("manifest.json", b"{}"), (HEAD, listed(MEMBERS))], Reason.BUNDLE_FORMAT, "first member"),
        (lambda: [(HEAD, b"{}")], Reason.BUNDLE_FORMAT, HEAD),
        (lambda: [(HEAD, b"[" * 100_000)], Reason.BUNDLE_FORMAT, HEAD),
        (lambda: [(HEAD, listed({}, format=2))], Reason.BUNDLE_FORMAT, "format"),
        (lambda: [(HEAD, listed({}, more=1))], Reason.BUNDLE_FORMAT, HEAD),
        (lambda: [(HEAD, listed(MEMBERS))], Reason.BUNDLE_DAMAGED, "members"),
        (lambda: [(HEAD, listed({})), ("manifest.json", b"{}")], Reason.BUNDLE_DAMAGED, "members"),
        (
            lambda: [(HEAD, listed({"manifest.json": b"{}"})), ("manifest.json", b"{} ")],
            Reason.BUNDLE_DAMAGED, "manifest.json",
        ),
        (
            lambda: [(HEAD, listed({"manifest.json": b"{}"})), ("manifest.json", b"[]")],
            Reason.BUNDLE_DAMAGED, "manifest.json",
        ),
        (
            lambda: [(HEAD, listed({}, members=[{"name": "manifest.json", "size": -1, "sha256": "0" * 64}])),
                     ("manifest.json", b"{}")],
            Reason.BUNDLE_FORMAT, "manifest.json",
        ),
    ],
)  # fmt: skip
def test_what_is_no_listed_plain_archive_is_refused(
    tmp_path: Path, files: Callable[[], Any], reason: Reason, field: str
) -> None:
    """The reason code and the field say what is wrong."""
    problem = refusal(packed(tmp_path / "b.lzb", files()))
    assert problem.reason is reason and field in problem.field


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Who checks one and unpacks the other would be deceived."""
    entry = {"name": "manifest.json", "size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    head = listed({}, members=[entry, entry])
    path = packed(tmp_path / "b.lzb", [(HEAD, head), ("manifest.json", b"{}"), ("manifest.json", b"{}")])
    assert refusal(path).reason is Reason.BUNDLE_DAMAGED


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_another_packing_is_refused(tmp_path: Path, method: int) -> None:
    """Only what is stored or deflated is unpacked."""
    path = packed(tmp_path / "b.lzb", with_member("manifest.json", b"{}"), compression=method)
    assert refusal(path).reason is Reason.BUNDLE_UNSAFE


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that outgrows what the list says is left at that edge; a list beyond the limit is refused."""
    bomb = bytes(64 << 20)
    head = listed({"manifest.json": b"{}"})
    path = packed(
        tmp_path / "b.lzb", [(HEAD, head), ("manifest.json", bomb)], compression=zipfile.ZIP_DEFLATED
    )
    assert path.stat().st_size < 1 << 20
    taken: list[int] = []
    read = zipfile.ZipExtFile.read
    monkeypatch.setattr(
        zipfile.ZipExtFile,
        "read",
        lambda self, n=-1: taken.append(n) or read(self, n),  # type: ignore[func-returns-value]
    )
    problem = refusal(path)
    assert (problem.needs, problem.got) == ("2 bytes", "more than 2 bytes") and all(
        0 < n < 1 << 25 for n in taken
    )
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 100)
    problem = refusal(packed(tmp_path / "c.lzb", with_member("manifest.json", b" " * 101)))
    assert problem.reason is Reason.BUNDLE_UNSAFE and "100 bytes" in problem.needs
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 100)
    assert refusal(path).needs == "at most 100 bytes"
    monkeypatch.undo()
    monkeypatch.setattr(archive, "MAX_MEMBERS", 1)
    assert refusal(path).needs == "at most 1"


@given(st.data())
def test_a_cut_or_altered_file_is_refused_or_has_the_same_contents(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any cut and any changed byte; with the digest pinned, every one is refused for it."""
    path = tmp_path_factory.mktemp("cut") / "b.lzb"
    digest = write_archive(path, ENVIRONMENT, MEMBERS)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    broken = whole[:place]
    if data.draw(st.booleans()):
        broken += bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path.write_bytes(broken)
    assert refusal(path, sha256=digest).reason is Reason.BUNDLE_UNTRUSTED
    try:
        read = read_archive(path)
    except lz.BundleRefusedError as error:
        assert {problem.reason for problem in error.problems} <= set(Reason.__members__.values())
    else:
        assert {m.name: read.read(m) for m in read.head.members} == MEMBERS
        assert read.head.environment == ENVIRONMENT


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of POSIX")
def test_a_file_that_others_can_write_needs_a_pinned_digest(tmp_path: Path) -> None:
    """Whose file it is decides who may run code here; a digest says it better."""
    path = tmp_path / "b.lzb"
    digest = write_archive(path, ENVIRONMENT, MEMBERS)
    path.chmod(0o666)
    problem = refusal(path)
    assert problem.reason is Reason.BUNDLE_UNTRUSTED and "mode 666" in problem.got
    assert read_archive(path, sha256=digest).sha256 == digest
    with pytest.raises(ValueError, match="sha256 needs 64 hexadecimal digits, got 'abc'"):
        read_archive(path, sha256="abc")


def test_a_pipe_at_the_place_of_a_bundle_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor a device, both of which may never end."""
    os.mkfifo(tmp_path / "pipe")

    def opened(*_: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(zipfile, "ZipFile", opened)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FileExistsError, match="not replaced"):
            write_archive(path, ENVIRONMENT, MEMBERS)


def test_nothing_but_a_bundle_is_written_over(tmp_path: Path) -> None:
    """A mistyped path does not cost a file."""
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(FileExistsError, match="not replaced"):
        write_archive(path, ENVIRONMENT, MEMBERS)
    assert path.read_text() == "years of work"
    other = packed(tmp_path / "photos.zip", [("a.jpg", b"x")])
    with pytest.raises(FileExistsError):
        write_archive(other, ENVIRONMENT, MEMBERS)
    write_archive(tmp_path / "b.lzb", ENVIRONMENT, {})
    write_archive(tmp_path / "b.lzb", ENVIRONMENT, MEMBERS)
    assert len(read_archive(tmp_path / "b.lzb").names) == len(MEMBERS)


def test_a_bundle_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no machine would read is an error on the one that writes."""
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 10)
    with pytest.raises(ValueError, match="needs at most 10 bytes"):
        write_archive(tmp_path / "b.lzb", ENVIRONMENT, MEMBERS)
    assert not (tmp_path / "b.lzb").exists()


def test_an_archive_behind_other_bytes_is_refused(tmp_path: Path) -> None:
    """A file that is two things at once is none of ours."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(HEAD, listed({}))
    path = tmp_path / "b.lzb"
    path.write_bytes(b"#!/bin/sh\n" + buffer.getvalue())
    assert refusal(path).reason is Reason.BUNDLE_FORMAT
