"""Hub kernels from a folder: what was locked and allowed runs; anything else is refused unrun."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.hub import Hub, hub_kernel, lock_folder
from layerzero.spec.capability import Capability
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.kernel import Efficiency

REPOSITORY = "acme/norms"
CODE = """
import torch
from pathlib import Path
Path({ran!r}).touch()
def rms(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
"""
needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="the kernels library is not installed"
)


class Shelf:
    """A folder with one repository and its lock file."""

    def __init__(self, root: Path) -> None:
        self.folder, self.lockfile, self.ran = root / "hub", root / "kernels.lock", root / "ran"
        self.variant = self.folder / REPOSITORY / "build" / "torch-cpu"
        self.variant.mkdir(parents=True)
        (self.variant / "__init__.py").write_text(CODE.format(ran=str(self.ran)))
        metadata = {
            "id": f"norms_{root.name}", "name": "norms", "version": 1, "license": "apache-2.0",
            "python-depends": [], "backend": {"type": "cpu"},
        }  # fmt: skip
        (self.variant / "metadata.json").write_text(json.dumps(metadata))
        self.lock()

    def lock(self) -> None:
        """Lock what is there now."""
        self.lockfile.write_text(json.dumps(lock_folder(self.folder, {REPOSITORY: (1, "0" * 40)})))

    def hub(self, *allow: str) -> Hub:
        return Hub(self.folder, self.lockfile, allow=allow or (REPOSITORY,))

    def load(self) -> Any:
        """The repository's module, through a hub opened anew on what lies there now."""
        return self.hub().load(REPOSITORY)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@needs_kernels
def test_a_locked_and_allowed_repository_runs(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered as a kernel it is chosen by its price, and its result is right."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernel = hub_kernel(
        "acme.rms_norm.hub",
        "rms_norm",
        shelf.hub(),
        REPOSITORY,
        lambda module: module.rms,
        Capability(source="its author", platforms=frozenset({"cpu"}), features=frozenset({"no_weight"})),
        efficiency=Efficiency(1.0, 1.0, 0.01, "a test: as fast as can be"),
    )
    x = torch.randn(4, 16)
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        runtime.add_kernel(kernel)
        out = lz.sync.rms_norm(x, backend="acme")
        assert lz.last_selection().kernel == "acme.rms_norm.hub"  # type: ignore[union-attr]
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (16,), eps=1e-6))
    assert shelf.ran.exists() and not list(shelf.folder.rglob("__pycache__"))


@needs_kernels
def test_nothing_built_for_this_system_is_a_reason(shelf: Shelf) -> None:
    """A repository with other variants only is refused by the library's own resolver."""
    shelf.variant.rename(shelf.variant.with_name("torch-cuda"))
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match="Cannot find a build variant"):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it


def test_a_changed_file_is_refused(shelf: Shelf) -> None:
    """One byte is enough."""
    file = shelf.variant / "__init__.py"
    file.write_bytes(file.read_bytes() + b"#")
    with pytest.raises(
        BackendNotAvailableError, match=r"build/torch-cpu/__init__\.py is not what was locked"
    ):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it


@needs_kernels
def test_what_was_checked_is_what_runs(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that is put in place of a file between its check and its import is not looked at."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = importlib.import_module

    def late(name: str) -> Any:  # the last thing that happens before the repository is imported
        for file in shelf.folder.rglob("__init__.py"):
            file.write_text(f"from pathlib import Path; Path({str(tmp_path / 'planted')!r}).touch()")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", late)
    module = shelf.hub().load(REPOSITORY)
    assert shelf.ran.exists() and not (tmp_path / "planted").exists()
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(tmp_path / "cache" / "layerzero" / "hub")
    assert (tmp_path / "cache" / "layerzero" / "hub").stat().st_mode & 0o077 == 0


def test_a_copy_is_made_once_and_anew_where_it_was_changed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later process finds it, and holds it against the lock file before it runs; nothing else is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = shelf.hub()._copied(REPOSITORY)
    code = first / "build" / "torch-cpu" / "__init__.py"
    inode = code.stat().st_ino
    assert shelf.hub()._copied(REPOSITORY) == first and code.stat().st_ino == inode
    right = code.read_bytes()
    code.write_bytes(right + b"#")
    assert shelf.hub()._copied(REPOSITORY) == first and code.read_bytes() == right
    assert len(list((tmp_path / "cache" / "layerzero" / "hub").iterdir())) == 1


def test_a_cache_that_others_can_write_takes_no_copy(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing runs from a folder in which others can put files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "layerzero" / "hub").mkdir(parents=True)
    (tmp_path / "cache" / "layerzero" / "hub").chmod(0o777)
    with pytest.raises(BackendNotAvailableError, match=r"no private copy of it can be made.*no other user"):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it


def test_a_file_too_many_or_too_few_is_refused(shelf: Shelf) -> None:
    """Compiled Python beside the source, and a file that is gone."""
    cache = shelf.variant / "__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"evil")
    with pytest.raises(
        BackendNotAvailableError, match=r"__pycache__/__init__\.cpython-311\.pyc is not in the lock file"
    ):
        shelf.load()
    shutil.rmtree(cache)
    (shelf.variant / "metadata.json").unlink()
    with pytest.raises(BackendNotAvailableError, match=r"metadata\.json is locked and not there"):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it


def test_a_link_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    """Inside the repository, and in place of it."""
    (shelf.variant / "more.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(BackendNotAvailableError, match=r"more\.py is a link"):
        shelf.load()
    (shelf.variant / "more.py").unlink()
    outside = tmp_path / "outside"
    (shelf.folder / REPOSITORY).rename(outside)
    (shelf.folder / REPOSITORY).symlink_to(outside)
    with pytest.raises(BackendNotAvailableError, match="a link that leads elsewhere"):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it


@pytest.mark.parametrize(
    "name", ["../../etc", "acme/../../etc", "acme", "acme/norms/build", "/etc/x", ".a/b", "a/.b", ""]
)
def test_a_name_that_leads_elsewhere_is_refused(shelf: Shelf, name: str) -> None:
    """Names are an owner and a name; nothing is looked up on the disk for others."""
    with pytest.raises(BackendNotAvailableError, match="its name is no <owner>/<name>"):
        shelf.hub(name).verified(name)
    with pytest.raises(BackendNotAvailableError, match="its name is no"):
        lock_folder(shelf.folder, {name: (None, "0")})


def test_what_is_not_allowed_or_not_locked_is_refused(shelf: Shelf) -> None:
    """Both lists must name the repository."""
    with pytest.raises(BackendNotAvailableError, match="not on the allow list"):
        shelf.hub("acme/other").verified(REPOSITORY)
    with pytest.raises(BackendNotAvailableError, match="not in the lock file"):
        shelf.hub("acme/other").verified("acme/other")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "readable lock file"),
        ("{}", "readable lock file"),
        ('[{"dependency": {"repo-id": "a/b"}, "lock": {"commit": "x"}}]', "files"),
        ('[{"dependency": {"repo-id": "a/b"}, "lock": {"commit": "x"}, "files": {}, "more": 1}]', "more"),
        ('[{"dependency": {"repo-id": "a/b"}, "lock": {"commit": "x"}, "files": {"f": "00"}}]', "SHA-256"),
    ],
)
def test_a_broken_lock_file_is_an_error(shelf: Shelf, text: str, words: str) -> None:
    """Closed on anything unexpected: no lock file, no kernels."""
    shelf.lockfile.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        shelf.hub()
    shelf.lockfile.unlink()
    with pytest.raises(ConfigurationError, match="readable lock file"):
        shelf.hub()


def test_the_lock_file_names_each_repository_once(shelf: Shelf) -> None:
    """The second entry could hold other digests."""
    entries: list[Any] = json.loads(shelf.lockfile.read_text())
    shelf.lockfile.write_text(json.dumps(entries * 2))
    with pytest.raises(ConfigurationError, match="got acme/norms twice"):
        shelf.hub()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_shared_object_needs_the_stable_abi_and_an_old_c_library(shelf: Shelf) -> None:
    """Built here for real: a plain name is refused, a stable one taken, a newer C library refused."""
    source = shelf.folder.parent / "unit.c"
    source.write_text("int answer(void) { return 42; }\n")
    built = shelf.variant / "_unit.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-o", str(built), str(source)], check=True)
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match=r"_unit\.so is not built for Python's stable ABI"):
        shelf.load()
    stable = built.rename(shelf.variant / "_unit.abi3.so")
    shelf.lock()
    assert shelf.hub().verified(REPOSITORY) == shelf.folder / REPOSITORY
    stable.write_bytes(stable.read_bytes() + b"\0GLIBC_2.38\0")
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match=r"needs GLIBC_2\.38 .* above manylinux_2_28"):
        shelf.load()
    stable.write_bytes(b"MZ" + os.urandom(64))
    shelf.lock()
    with pytest.raises(BackendNotAvailableError, match="is no ELF file"):
        shelf.load()
    assert not shelf.ran.exists()  # no line of it
