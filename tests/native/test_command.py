"""`python -m layerzero.native`: compiles once, and ends well where it cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from layerzero.native import __main__
from layerzero.spec.errors import BackendNotAvailableError


def test_a_machine_without_a_compiler_goes_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 and the reason, since everything works without; ready where all is compiled."""

    def missing() -> None:
        raise BackendNotAvailableError("no C++ compiler", backend="native")

    notes = SimpleNamespace(load=lambda: None)
    monkeypatch.setattr(__main__, "KERNEL_NOTES", notes)
    monkeypatch.setattr(__main__, "FAST_PATH", SimpleNamespace(compiled=False, load=missing))
    assert __main__.main() == 0
    said = capsys.readouterr().out
    assert "compiling, once for this machine" in said and "goes without: no C++ compiler" in said
    monkeypatch.setattr(__main__, "FAST_PATH", SimpleNamespace(compiled=True, load=lambda: None))
    assert __main__.main() == 0
    said = capsys.readouterr().out
    assert "compiling" not in said and "layerzero.native: ready after " in said
