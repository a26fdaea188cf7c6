"""The file of a warm-up bundle: a zip whose first member lists the others with their sizes and digests.

Everything is checked before anything of it is used: the digest of the whole file where one is pinned, the
list, each name, each member's size and digest. It is read once, into memory, so what was checked is what is
used, even where another process writes the file meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from layerzero._util import files
from layerzero.spec.errors import BundleRefusedError
from layerzero.spec.reasons import Reason

FORMAT = 1
HEAD = "bundle.json"
# What a bundle may be: far above what a model needs, far below what harms a machine.
MAX_FILE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 2 << 30
MAX_HEAD_BYTES = 16 << 20
MAX_MEMBERS = 50_000

_KEY = "[A-Z2-7]{52}"  # of Triton's cache: base 32 of a SHA-256
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,120}"
# Every member that there can be; nothing else is ever written.
MEMBER = re.compile(
    rf"flashinfer/{_WORD}/(?P<archs>{_WORD})/(?P<module>{_WORD})/(?P=module)\.so"
    rf"|triton/{_KEY}/{_WORD}"
    r"|native/[a-z_]{1,40}-[0-9a-f]{32}\.so"
    r"|(proofs|measurements|dispatch_table|manifest)\.json"
)
_DIGEST = re.compile("[0-9a-f]{64}")
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class BundleMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a bundle: its name in it, its bytes and their SHA-256."""

    name: str
    size: int
    sha256: str


class BundleHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle says of itself: the environment that it was made in, and every other member."""

    format: int
    environment: dict[str, str]
    members: tuple[BundleMember, ...]


class Archive:
    """A bundle that was checked: its head, its own SHA-256, and its members' bytes."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.sha256 = path, hashlib.sha256(data).hexdigest()
        self._refused = partial(BundleRefusedError.because, path)
        self._size = len(data)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as self._zip:
                self.head = self._checked_head()
        except _DAMAGE as error:
            raise self._refused(Reason.BUNDLE_DAMAGED, "file", "a whole bundle", str(error)) from error
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        for member in self.head.members:
            self.read(member)

    @property
    def names(self) -> tuple[str, ...]:
        """The members beside the head."""
        return tuple(member.name for member in self.head.members)

    def find(self, name: str) -> bytes | None:
        """The bytes of a member; None where there is none of that name."""
        return next((self.read(member) for member in self.head.members if member.name == name), None)

    def read(self, member: BundleMember) -> bytes:
        """The bytes of a member, which are those that the head states.

        Raises: BundleRefusedError: they are not.
        """
        try:
            with self._zip.open(member.name) as file:
                data = file.read(member.size + 1)
        except _DAMAGE as error:
            raise self._refused(Reason.BUNDLE_DAMAGED, member.name, "to unpack", str(error)) from error
        if len(data) != member.size:
            got = f"more than {member.size}" if len(data) > member.size else str(len(data))
            raise self._refused(Reason.BUNDLE_DAMAGED, member.name, f"{member.size} bytes", f"{got} bytes")
        digest, needs = hashlib.sha256(data).hexdigest(), f"SHA-256 {member.sha256[:16]}"
        if digest != member.sha256:
            raise self._refused(Reason.BUNDLE_DAMAGED, member.name, needs, digest[:16])
        return data

    def _checked_head(self) -> BundleHeader:
        infos = self._zip.infolist()
        if not infos or infos[0].filename != HEAD or infos[0].header_offset:
            got = repr(infos[0].filename[:120]) if infos else "none"
            raise self._refused(Reason.BUNDLE_FORMAT, "first member", HEAD, got)
        if len(infos) > MAX_MEMBERS:
            raise self._refused(Reason.BUNDLE_UNSAFE, "members", f"at most {MAX_MEMBERS}", str(len(infos)))
        for number, info in enumerate(infos):
            self._need_plain(info, is_member=not number or MEMBER.fullmatch(info.filename) is not None)
        with self._zip.open(infos[0]) as file:
            data = file.read(MAX_HEAD_BYTES + 1)
        if len(data) > MAX_HEAD_BYTES:
            raise self._refused(Reason.BUNDLE_UNSAFE, HEAD, f"at most {MAX_HEAD_BYTES} bytes", "more")
        try:
            format_found = files.decode_json(data, files.StatedFormat).format
            if format_found != FORMAT:
                raise self._refused(Reason.BUNDLE_FORMAT, "format", str(FORMAT), str(format_found))
            head = files.decode_json(data, BundleHeader)
        except msgspec.MsgspecError as error:
            raise self._refused(Reason.BUNDLE_FORMAT, HEAD, "a bundle's list", str(error)) from error
        self._need_listed(head, [info.filename for info in infos[1:]])
        return head

    def _need_plain(self, info: zipfile.ZipInfo, *, is_member: bool) -> None:
        """Refuse what is no plain file of a name that we know: links, folders, other paths, other coders."""
        kind = stat.S_IFMT(info.external_attr >> 16)
        got = ""
        if not is_member:
            got = "another name"
        elif info.is_dir() or kind not in (0, stat.S_IFREG):
            got = "a link, folder or device"
        elif info.flag_bits & 1 or info.compress_type not in _PLAIN:
            got = "an encrypted or strangely packed one"
        if got:
            name = repr(info.filename[:120])
            raise self._refused(Reason.BUNDLE_UNSAFE, f"member {name}", "a plain file of a bundle", got)

    def _need_listed(self, head: BundleHeader, names: list[str]) -> None:
        """Refuse a list that is not that of the members, or states what cannot be."""
        if [member.name for member in head.members] != names or len(set(names)) != len(names):
            listed = {member.name for member in head.members}
            strange = sorted(listed.symmetric_difference(names))[:3]
            got = f"others: {', '.join(strange)}" if strange else "one twice, or in another order"
            raise self._refused(Reason.BUNDLE_DAMAGED, "members", "those that its list names", got)
        for member in head.members:
            if member.size < 0 or not _DIGEST.fullmatch(member.sha256):
                needs = "a size and a SHA-256"
                raise self._refused(Reason.BUNDLE_FORMAT, member.name, needs, f"{member.size}")
        total, needs = sum(member.size for member in head.members), f"at most {MAX_UNPACKED_BYTES} bytes"
        if total > MAX_UNPACKED_BYTES:
            raise self._refused(Reason.BUNDLE_UNSAFE, "members", needs, f"{total} bytes")


_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, ValueError)


def read_archive(path: str | os.PathLike[str], *, sha256: str | None = None) -> Archive:
    """A bundle, every byte of which was checked; `sha256` pins the digest of the whole file.

    Raises: BundleRefusedError: it is cut off, altered, no bundle, unsafe, not the one that was pinned, or,
        where none was, a file that other users can write. OSError: it cannot be read. ValueError: `sha256` is
        no digest.
    """
    where, refused = Path(path), partial(BundleRefusedError.because, path)
    if sha256 is not None and not (isinstance(sha256, str) and _DIGEST.fullmatch(sha256.lower())):
        raise ValueError(f"sha256 needs 64 hexadecimal digits, got {sha256!r}")
    try:
        data = files.read_given(where, MAX_FILE_BYTES, trusted=sha256 is None)
    except files.ExposedError as error:
        needs = "no other user who can write it, or a pinned sha256"
        raise refused(Reason.BUNDLE_UNTRUSTED, "file", needs, str(error.strerror)) from error
    except ValueError as error:
        needs = f"at most {MAX_FILE_BYTES} bytes"
        raise refused(Reason.BUNDLE_UNSAFE, "file", needs, "more") from error
    if sha256 is not None and (got := hashlib.sha256(data).hexdigest()) != sha256.lower():
        raise refused(Reason.BUNDLE_UNTRUSTED, "sha256", sha256.lower(), got)
    return Archive(where, data)


def write_archive(
    path: str | os.PathLike[str], environment: Mapping[str, str], members: Mapping[str, bytes]
) -> str:
    """Write a bundle, whole or not at all; its SHA-256. Equal contents give equal bytes.

    Raises: FileExistsError: another kind of file is there. OSError: it cannot be written. ValueError: it is
        larger than a bundle may be.
    """
    where = Path(path)
    names = sorted(members)
    listed = tuple(
        BundleMember(name, len(members[name]), hashlib.sha256(members[name]).hexdigest()) for name in names
    )
    total = sum(member.size for member in listed)
    if total > MAX_UNPACKED_BYTES or len(names) >= MAX_MEMBERS:
        raise ValueError(
            f"{where}: a bundle needs at most {MAX_UNPACKED_BYTES} bytes in {MAX_MEMBERS} files, "
            f"got {total} bytes in {len(names)}"
        )
    _need_bundle(where)
    head = msgspec.json.encode(BundleHeader(FORMAT, dict(sorted(environment.items())), listed))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in ((HEAD, head), *((name, members[name]) for name in names)):
            info = zipfile.ZipInfo(name)  # of 1980: nothing in it tells when it was made
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | 0o600) << 16
            archive.writestr(info, data, compresslevel=6)
    files.put_whole(where, packed.getvalue())
    return hashlib.sha256(packed.getvalue()).hexdigest()


def _need_bundle(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if path.is_file():  # a pipe or device would not end
        with suppress(*_DAMAGE), zipfile.ZipFile(path) as archive:
            if archive.namelist()[:1] == [HEAD]:
                return
    raise FileExistsError(17, f"not replaced: it is no file with {HEAD!r}", str(path))
