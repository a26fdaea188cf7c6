"""`lz capabilities`: what is exported checks out, and an overlay says what it takes away."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import Lz


def test_what_is_exported_checks_out(lz: Lz, tmp_path: Path) -> None:
    """The file holds every built-in kernel and its hash; one changed number fails the check."""
    path = tmp_path / "capabilities.json"
    exported = json.loads(lz("capabilities", "export", str(path), "--json").stdout)
    assert exported["kernels"] > 60
    checked = json.loads(lz("capabilities", "check", str(path), "--json").stdout)
    assert checked["ok"] and checked["digest"] == exported["content"]
    path.write_text(path.read_text().replace('"alignment": 16', '"alignment": 8', 1))
    result = lz("capabilities", "check", str(path))
    assert result.exit_code == 1 and "do not match" in result.output


def test_an_overlay_says_what_it_takes(lz: Lz, tmp_path: Path) -> None:
    """Narrowed kernels are listed by field; a wider field is status 1 with the way out."""
    path = tmp_path / "overlay.yaml"
    text = "version: 2\nkernels:\n  torch.attention.sdpa_flash:\n    capability: {dtypes: [DTYPE]}\n"
    path.write_text(text.replace("DTYPE", "bfloat16"))
    result = lz("capabilities", "check", "--overlay", str(path))
    assert result.exit_code == 0 and "torch.attention.sdpa_flash: dtypes" in result.output
    path.write_text(text.replace("DTYPE", "int8"))
    result = lz("capabilities", "check", "--overlay", str(path))
    assert result.exit_code == 1 and ":3:" in result.output and "may only narrow" in result.output


def test_a_place_that_cannot_be_written_is_told(lz: Lz, tmp_path: Path) -> None:
    """A file where a folder has to be: one line with the path and the reason, and status 1."""
    (tmp_path / "file").touch()
    result = lz("capabilities", "export", str(tmp_path / "file" / "capabilities.json"))
    assert result.exit_code == 1 and "Error: " in result.output
    assert str(tmp_path / "file") in result.output and len(result.output.splitlines()) == 1
