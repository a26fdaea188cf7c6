"""What libraries were built for, read from real shared objects before they are loaded."""

from __future__ import annotations

import struct
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.backends.builds import build_facts, facts_of, strings_of
from layerzero.spec.reasons import Reason
from tests.actors.isolation.plugged import compiled

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
# What an extension of torch calls where it takes a string: the ABI is in the symbol's name.
CHECKS = """
#include <string>
namespace c10 { namespace detail {
void torchCheckFail(const char *, const char *, unsigned, const std::string &);
} }
extern "C" void fails() { c10::detail::torchCheckFail("f", "f", 1, std::string("x")); }
"""


def distribution(folder: Path, name: str, *objects: Path) -> None:
    """Have an installed distribution with these files."""
    info = folder / f"{name.replace(chr(45), chr(95))}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{path.relative_to(folder)},,\n" for path in objects))


def torch_object(target: Path, abi: int) -> Path:
    """A shared object that calls torch with the strings of an ABI."""
    return compiled(
        CHECKS, target, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-L{Path(torch.__file__).parent / 'lib'}",
        "-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--allow-shlib-undefined", language="c++",
    )  # fmt: skip


def test_a_library_of_the_other_abi_is_refused_before_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is blocked with the reason and both sides; its load was never called."""
    distribution(tmp_path, "old-abi", torch_object(tmp_path / f"_old{SUFFIX}", abi=0))
    distribution(tmp_path, "new-abi", torch_object(tmp_path / f"_new{SUFFIX}", abi=1))
    monkeypatch.syspath_prepend(tmp_path)
    loaded: list[str] = []
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        for name in ("old", "new"):

            def load(name: str = name) -> Callable[..., torch.Tensor]:
                loaded.append(name)
                return torch.rms_norm

            kernel = lz.Kernel.of(
                f"{name}.rms_norm", load,
                (0.5, 0.5, 1.0), "a test's", source="a test's", distributions=(f"{name}-abi>=1",),
            )  # fmt: skip
            runtime.add_kernel(kernel)
            runtime.device().warm([kernel.id])
        blocked = runtime.device().registry.blocked()
    assert loaded == ["new"]
    assert blocked["old.rms_norm"].reason is Reason.BACKEND_PLATFORM_BUILD
    assert "old-abi: C++ of torch needs the ABI before GCC 5" in blocked["old.rms_norm"].got


def test_a_library_of_another_cuda_python_or_libc_is_named(tmp_path: Path) -> None:
    """Each with what it needs and what this process has."""
    cudart = compiled("void start() {}", tmp_path / "libcudart.so.9", "-Wl,-soname,libcudart.so.9")
    uses = compiled("void start(); void run() { start(); }", tmp_path / "_uses.so", str(cudart))
    other = tmp_path / "_uses.cpython-38-x86_64-linux-gnu.so"
    other.write_bytes(uses.read_bytes())
    facts = {fact.what: fact for fact in facts_of("uses", [uses, other])}
    assert (facts["CUDA"].needs, facts["CUDA"].fits) == ("CUDA 9", False)
    assert (facts["Python"].needs, facts["Python"].fits) == ("3.8", False)
    assert facts["Python"].got == "{}.{}".format(*sys.version_info[:2])
    mine = compiled("void run() {}", tmp_path / f"_uses{SUFFIX}")
    assert {fact.what: fact.fits for fact in facts_of("uses", [other, mine])}["Python"]  # it has both builds
    newer = uses.read_bytes().replace(b"\0libcudart.so.9\0", b"\0GLIBC_9.99\0xxx\0")
    (tmp_path / "_newer.so").write_bytes(newer)
    libc = {fact.what: fact for fact in facts_of("newer", [tmp_path / "_newer.so"])}["C library"]
    assert (libc.needs, libc.fits) == ("glibc >= 9.99", False)


@pytest.mark.parametrize("where", [2**63, 2**64 - 1, 1 << 40])
def test_a_damaged_shared_object_needs_nothing(where: int, tmp_path: Path) -> None:
    """Its headers begin where no file ends."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, where)
    struct.pack_into("<HH", header, 54, 56, 1)
    (tmp_path / "damaged.so").write_bytes(header)
    assert strings_of(tmp_path / "damaged.so") == b""


def test_what_is_no_shared_object_needs_nothing(tmp_path: Path) -> None:
    """Cut, empty, of another kind or gone: no strings, and no error."""
    whole = compiled("void run() {}", tmp_path / "_whole.so").read_bytes()
    assert strings_of(tmp_path / "_whole.so")
    for number, content in enumerate((b"", b"\x7fELF", whole[:70], b"MZ" + whole, whole[: len(whole) // 2])):
        path = tmp_path / f"{number}.so"
        path.write_bytes(content)
        assert isinstance(strings_of(path), bytes) and facts_of("x", [path]) == ()
    assert strings_of(tmp_path / "gone.so") == b"" and build_facts("not-installed-anywhere") == ()


def test_what_runs_here_fits_and_doctor_says_so() -> None:
    """numpy is imported in this process, so every fact of it fits."""
    facts = build_facts("numpy")
    assert {"C library", "Python"} <= {fact.what for fact in facts} and all(fact.fits for fact in facts)
    sections = dict((title, rows) for title, _, rows in lz.doctor(imports=False).sections())
    assert all(len(row) == 5 for row in sections["what libraries were built for"])
