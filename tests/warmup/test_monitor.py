"""What a monitor sees: compilers by name, Triton's by its hook, and nothing once it is closed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.warmup.monitor import CompilationForbiddenError, watching


def test_a_compiler_of_ones_own_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CXX names counts, by whichever path; other programs do not."""
    monkeypatch.setenv("CXX", "/opt/acme/acc")
    with watching() as monitor:
        for program in ("/usr/bin/acc", "/usr/bin/x86_64-linux-gnu-g++-12", "/usr/bin/cat"):
            sys.audit("subprocess.Popen", program, [program], None, None)
    sys.audit("subprocess.Popen", "/usr/bin/acc", ["acc"], None, None)
    assert [event.what for event in monitor.compiled] == [
        "/usr/bin/acc",
        "/usr/bin/x86_64-linux-gnu-g++-12",
    ]


@pytest.mark.parametrize("before", [None, lambda **_: "theirs"])
def test_tritons_hook_is_asked_as_well_and_given_back(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    """Who was there first is still asked, and has its place again afterwards."""
    runtime = SimpleNamespace(jit_cache_hook=before)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    with watching() as monitor:
        assert runtime.jit_cache_hook(repr="add[...]") == (before and "theirs")
    assert [event.what for event in monitor.compiled] == ["triton add[...]"]
    assert runtime.jit_cache_hook is before
    with pytest.raises(CompilationForbiddenError, match=r"triton add"), watching(forbid=True):
        runtime.jit_cache_hook(repr="add[...]")
