"""Where hub kernels come from: a server that speaks the hub's protocol, and archives; what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from layerzero.backends.hub import Hub, hub_kernel, lock_folder
from layerzero.perfdb import versions_of
from layerzero.spec.capability import Capability
from layerzero.spec.errors import BackendNotAvailableError
from tests.backends.hub_server import serving
from tests.backends.test_hub import REPOSITORY, Shelf, needs_kernels
from tests.children import run

_DOWNLOAD = """
import json, sys, torch
from layerzero.backends.hub import Hub
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError

folder, lockfile, allowed, *names = sys.argv[1:]
hub = Hub(folder, lockfile, allow=allowed.split(","))
said = []
for name in names:
    try:
        where = hub.download(name)
        out = hub.load(name).rms(torch.ones(2, 4), None, 1e-6)
        said.append([str(where), out.sum().item()])
    except BackendNotAvailableError as error:
        said.append([str(error), error.context["reason"].value])
print(json.dumps(said))
"""


def fetch(shelf: Shelf, url: str, *names: str, allowed: str = REPOSITORY) -> list[list[Any]]:
    """What a process says that downloads and runs repositories out of a hub at `url`, into a new folder."""
    folder = shelf.folder.parent / "here"
    folder.mkdir(exist_ok=True)
    variables = {
        **os.environ, "HF_ENDPOINT": url, "HF_HOME": str(shelf.folder.parent / "hf"), "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(shelf.folder.parent / "cache"), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    done = run(
        _DOWNLOAD,
        str(folder),
        str(shelf.lockfile),
        allowed,
        *names,
        folder=folder.parent,
        variables=variables,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@needs_kernels
def test_a_locked_repository_is_downloaded_and_runs(shelf: Shelf) -> None:
    """Through `kernels`, at the locked commit, the variant for this system alone; then as from a folder."""
    other = shelf.folder / REPOSITORY / "build" / "torch-cuda"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit")
    shelf.lock()
    with serving(shelf.folder) as server:
        ((where, total),) = fetch(shelf, server.url, REPOSITORY)
        assert (where, total) == (
            str(shelf.folder.parent / "here" / REPOSITORY),
            pytest.approx(8.0, abs=1e-3),
        )
        files = [p for p in Path(where).rglob("*") if p.is_file()]
        assert {p.parent.name for p in files} == {"torch-cpu"} and not any(p.is_symlink() for p in files)
        assert all("0" * 40 in path for path in server.asked if "acme" in path)
    # Without the hub the next process finds it.
    hub = Hub(shelf.folder.parent / "here", shelf.lockfile, allow=[REPOSITORY])
    assert hub.verified(REPOSITORY) == Path(where)


@needs_kernels
def test_what_is_not_allowed_or_not_locked_is_not_asked_for(shelf: Shelf) -> None:
    """The hub hears nothing of a name that one of the two lists lacks, or that is none."""
    with serving(shelf.folder) as server:
        said = fetch(shelf, server.url, REPOSITORY, "acme/new", "../../etc", allowed="acme/new,../../etc")
        assert server.asked == []
    assert [text.rpartition(": ")[2] for text, _ in said] == [
        "it is not on the allow list", "it is not in the lock file", "its name is no <owner>/<name>"
    ]  # fmt: skip


@needs_kernels
def test_what_the_hub_changed_or_added_is_refused_and_not_kept(shelf: Shelf) -> None:
    """Another byte, a file more, a path that leads elsewhere, a bomb, no answer: nothing is in the folder."""
    code = shelf.variant / "__init__.py"
    right = code.read_bytes()
    here = shelf.folder.parent / "here"
    with serving(shelf.folder) as server:
        code.write_bytes(right + b"#")
        (changed,) = fetch(shelf, server.url, REPOSITORY)
        code.write_bytes(right)
        texts = []
        for path, size in (("build/torch-cpu/../../../../evil.py", 3), ("build/torch-cpu/more.py", 3),
                           ("build/torch-cpu/__init__.py", 3 << 30)):  # fmt: skip
            server.extra = [{"path": path, "oid": "0" * 40, "size": size, "type": "file"}]
            texts.append(fetch(shelf, server.url, REPOSITORY)[0][0])
        server.folder = shelf.folder / "nothing"
        (gone,) = fetch(shelf, server.url, REPOSITORY)
    assert "build/torch-cpu/__init__.py is not what was locked" in changed[0]
    assert "evil.py, which is not in the lock file" in texts[0] and "more.py, which is not" in texts[1]
    assert "more than 2147483648" in texts[2] and "cannot be downloaded: " in gone[0]
    assert not list(here.rglob("*.py")) and not shelf.ran.exists()


def metadata(shelf: Shelf, **changes: Any) -> None:
    """Another metadata file, reviewed and locked."""
    path = shelf.variant / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    shelf.lock()


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "it says it is version 2, and version 1 is locked"),
        ({"kernel-depends": [{"repo-id": "evil/code", "version": 1}]}, "it would download evil/code"),
        ({"id": "torch"}, "its id 'torch' is the name of a module that is loaded"),
        ({"id": "a.b/c"}, "its id needs to be a name"),
    ],
)
def test_what_clashes_is_refused_before_it_runs(
    shelf: Shelf, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version than the lock's, dependencies that nobody locked, the name of a module."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shelf.folder.parent / "cache"))
    metadata(shelf, **changes)
    with pytest.raises(BackendNotAvailableError, match=words):
        shelf.load()
    assert not shelf.ran.exists()


@needs_kernels
def test_a_namespace_of_operators_that_is_taken_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named in `_ops.py` nothing of it runs; registered all the same, it is refused when it has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shelf.folder.parent / "cache"))
    ops = shelf.variant / "_ops.py"
    ops.write_text("import torch\nops = torch.ops.aten\n")
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match=r"namespace torch\.ops\.aten is taken"):
        shelf.load()
    assert not shelf.ran.exists()
    ops.unlink()
    code = shelf.variant / "__init__.py"
    name = f"stolen_{shelf.folder.parent.name}"
    code.write_text(
        code.read_text()
        + f'\nlib = torch.library.Library("aten", "FRAGMENT")\nlib.define("{name}(Tensor x) -> Tensor")\n'
    )
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match=f"registers aten::{name} in a namespace"):
        shelf.load()


@needs_kernels
def test_two_versions_run_side_by_side(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each from its own copy under its own id, with its own numbers in measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = shelf.load()
    (tmp_path / "second").mkdir()
    second = Shelf(tmp_path / "second")
    code = second.variant / "__init__.py"
    code.write_text(code.read_text() + "\nNEW = True\n")
    metadata(second, version=2)
    second.lockfile.write_text(json.dumps(lock_folder(second.folder, {REPOSITORY: (2, "1" * 40)})))
    newer = second.load()
    assert hasattr(newer, "NEW") and not hasattr(first, "NEW") and shelf.load() is first
    kernels = [
        hub_kernel(
            "acme.rms_norm", "rms_norm", hub, REPOSITORY, lambda module: module.rms, Capability(source="x")
        )
        for hub in (shelf.hub(), second.hub())
    ]
    assert len(set(map(versions_of, kernels))) == 2


@needs_kernels
def test_where_a_signature_is_asked_for_one_that_is_missing_or_damaged_is_refused(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library's own check; without the setting the lock's digests are what counts."""
    pytest.importorskip("sigstore")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shelf.folder.parent / "cache"))
    signed = Hub(shelf.folder, shelf.lockfile, allow=[REPOSITORY], signed=True)
    with pytest.raises(BackendNotAvailableError, match="signature does not hold: SignatureBundleMissing"):
        signed.load(REPOSITORY)
    (shelf.variant / "metadata.json.sigstore").write_text("{}")
    shelf.lock()
    signed = Hub(shelf.folder, shelf.lockfile, allow=[REPOSITORY], signed=True)
    with pytest.raises(BackendNotAvailableError, match="signature does not hold: SignatureBundleInvalid"):
        signed.load(REPOSITORY)
    assert not shelf.ran.exists()
