"""`lz warmup` and `lz ready` as a deployment's gate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from layerzero.backends.native import load_module
from layerzero.measure.calls import call, tensor
from layerzero.warmup import Manifest
from tests.cli.command import Lz


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with one call that needs no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LAYERZERO_DENY", "zentorch.*")
    path = tmp_path / "manifest.json"
    embedding = call("embedding", ids=tensor(3, dtype="int64", fill="below", bound=5), weight=tensor(5, 8))
    Manifest(critical=(embedding,), others=(call("layer_norm", x=tensor(3, 8)),)).save(path)
    return str(path)


def test_a_manifest_is_warmed_and_then_ready(lz: Lz, manifest: str) -> None:
    """Both commands agree, as text and as JSON."""
    warmed = lz("warmup", manifest, "--device", "cpu")
    assert warmed.exit_code == 0, warmed.output
    assert "2 calls in" in warmed.output and "0 compilers started" in warmed.output
    ready = lz("ready", manifest, "--device", "cpu")
    assert ready.exit_code == 0 and "ready: 2 calls, nothing to compile" in ready.output
    plain = json.loads(lz("ready", manifest, "--device", "cpu", "--json").stdout)
    assert plain["ready"] is True and plain["problems"] == []
    assert json.loads(lz("warmup", manifest, "--device", "cpu", "--json").stdout)["ready"] is True


def test_what_would_have_to_be_compiled_is_not_ready(lz: Lz, tmp_path: Path, manifest: str) -> None:
    """The gate says what is missing, and compiles nothing itself."""
    path = tmp_path / "paged.json"
    pages = tensor(8, 4, 2, 16, dtype="float32")
    tables = tensor(2, 4, dtype="int64", fill="permutation", bound=8)
    Manifest(
        critical=(
            call(
                "paged_attention",
                q=tensor(2, 4, 16, dtype="float32"),
                k_cache=pages,
                v_cache=pages,
                block_tables=tables,
                seq_lens=tensor(2, dtype="int64", fill="constant", bound=9),
            ),
        )
    ).save(path)
    pytest.importorskip("layerzero.native.compiling", reason="the native kernel is for Unix")
    if shutil.which("g++") is None:
        pytest.skip("no compiler here: the native kernel is missing, so nothing would be compiled")
    load_module.cache_clear()
    result = lz("ready", str(path), "--device", "cpu")
    assert result.exit_code == 1 and "would be started" in result.output
    assert not list((tmp_path / "layerzero").rglob("*.so"))


def test_a_file_that_is_no_manifest_is_status_2(lz: Lz, tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "m.json"
    path.write_text("{}")
    for command in ("warmup", "ready"):
        result = lz(command, str(path))
        assert result.exit_code == 2 and "m.json" in result.output


def test_a_bundle_goes_from_machine_to_machine(
    lz: Lz, tmp_path: Path, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command writes it, the other loads it and warms its calls; as text and as JSON."""
    path = str(tmp_path / "warm.lzb")
    written = lz("warmup", manifest, "--device", "cpu", "--bundle", path)
    assert written.exit_code == 0 and f"wrote {path}" in written.output, written.output
    digest = written.output.partition("sha256 ")[2].split()[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    monkeypatch.setenv("LAYERZERO_WARM", "off")  # the doctor's first call would compile into it
    loaded = lz("warmup", "--from", path, "--sha256", digest, "--device", "cpu")
    assert loaded.exit_code == 0 and digest[:16] in loaded.output and "2 calls in" in loaded.output
    plain = json.loads(lz("warmup", "--from", path, "--device", "cpu", "--json").stdout)
    assert plain["ready"] is True and plain["bundle"]["sha256"] == digest and plain["saved"] is None
    assert digest[:16] in lz("doctor", "--quick").output


def test_a_bundle_that_is_refused_is_status_1_and_says_why(lz: Lz, tmp_path: Path, manifest: str) -> None:
    """Every problem on a line of its own, with its code; nothing was written."""
    path = tmp_path / "warm.lzb"
    lz("warmup", manifest, "--device", "cpu", "--bundle", str(path))
    wrong = lz("warmup", "--from", str(path), "--sha256", "0" * 64, "--device", "cpu")
    assert wrong.exit_code == 1 and "BUNDLE_UNTRUSTED: sha256 needs 0000" in wrong.output
    path.write_bytes(path.read_bytes()[:-30])
    cut = lz("warmup", "--from", str(path), "--device", "cpu")
    assert cut.exit_code == 1 and "BUNDLE_DAMAGED" in cut.output and "nothing was written" in cut.output
    assert not (tmp_path / "layerzero" / "bundles").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'MANIFEST'"),
        (("--sha256", "0" * 64), "Missing argument 'MANIFEST'"),
        (("M", "--sha256", "0" * 64), "--sha256 needs --from"),
        (("M", "--replace"), "--replace needs --from"),
        (("--from", "M", "--sha256", "abc"), "--sha256 needs 64 hexadecimal digits"),
    ],
)
def test_options_that_do_not_go_together_are_status_2(
    lz: Lz, manifest: str, arguments: tuple[str, ...], message: str
) -> None:
    """The message names the option."""
    given = [manifest if word == "M" else word for word in arguments]
    result = lz("warmup", *given, "--device", "cpu")
    assert result.exit_code == 2 and message in result.output
