"""Optional libraries are examined without endangering the process that asks."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from layerzero._util.libraries import LIBRARIES, Library, examine, import_failure

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the child process finds as `fragile`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "fragile.py"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended the process by SIGSEGV"),
        ("import os; os._exit(3)", "exit status 3"),
        ("import time; time.sleep(600)", "did not end within 2 s"),
        ("import sys; sys.stderr.write('x' * 10000 + '\\n'); sys.exit(1)", "xxx"),
    ],
)
def test_a_library_that_does_not_import_is_contained(module: Path, code: str, said: str) -> None:
    """An error, a crash, an exit and a hang each become one sentence."""
    module.write_text(code)
    failure = import_failure("fragile", 2.0)
    assert failure is not None and said in failure and len(failure) <= 400
    assert "fragile" not in sys.modules


def test_a_library_that_imports_has_no_failure(module: Path) -> None:
    """The child finds what this process would find."""
    module.write_text("x = 1")
    assert import_failure("fragile", 60.0) is None


def test_absent_libraries_name_what_installs_them() -> None:
    """An extra where there is one, else the distribution itself."""
    absent = (Library("a", "no-such-dist-1", "a", "flashinfer"), Library("b", "no-such-dist-2", "b"))
    first, second = examine(absent)
    assert (first.state, first.install) == ("missing", "pip install 'layerzero-runtime[flashinfer]'")
    assert (second.state, second.install) == ("missing", "pip install no-such-dist-2")


def test_an_installed_library_is_imported_only_on_request() -> None:
    """Metadata gives the version; importing is a second question."""
    here = (Library("msgspec", "msgspec", "msgspec"), Library("broken", "msgspec", "no_such_module_1"))
    assert [found.state for found in examine(here, imports=False)] == ["installed", "installed"]
    works, broken = examine(here)
    assert (works.state, works.version) == ("works", importlib.metadata.version("msgspec"))
    assert broken.state == "broken" and "No module named 'no_such_module_1'" in broken.detail


def test_an_ended_library_is_reported_and_never_imported() -> None:
    """IPEX is named with the reason that it is not used, installed or not."""
    (ipex,) = [library for library in LIBRARIES if library.backend == "ipex"]
    assert "archived" in ipex.ended
    (absent,) = examine([ipex])
    assert absent.state == "ended" and "its development has ended" in absent.detail
    (present,) = examine([Library("ipex", "msgspec", "no_such_module_1", "", ipex.ended)])
    assert present.state == "ended" and present.detail.startswith("installed and not used")


def test_the_extras_that_are_advised_exist_and_bring_the_library() -> None:
    """`pip install 'layerzero-runtime[x]'` installs what is missing."""
    for library in LIBRARIES:
        if library.extra:
            named = [r.replace("_", "-").lower() for r in EXTRAS[library.extra]]
            assert any(r.startswith(library.distribution.replace("_", "-")) for r in named), library


def test_every_extra_of_a_backend_is_examined() -> None:
    """A backend that pyproject.toml offers is one that doctor looks for."""
    offered = {"flashinfer", "flash-attn", "liger", "zentorch"}
    assert offered <= set(EXTRAS) and offered <= {library.extra for library in LIBRARIES}
