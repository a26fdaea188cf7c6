"""A torch that is too old is refused by the import, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero._util.requirements import need_torch
from tests import children

OLD = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.10.1+cu128")
import layerzero
"""


def test_an_old_torch_is_an_import_error(tmp_path: Path) -> None:
    """`import layerzero` ends with one sentence: needed, found, the command (FS-033)."""
    child = children.run(OLD, folder=tmp_path)
    assert child.returncode == 1
    assert child.stderr.splitlines()[-1] == (
        "ImportError: layerzero needs torch>=2.11, got 2.10.1+cu128: pip install --upgrade 'torch>=2.11'"
    )


def refusal(found: str) -> str:
    """What the check says of a torch of this version; empty where it passes."""
    try:
        need_torch(found)
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("found", ["2.11", "2.11.0a0+git1234", "2.11.0.dev20260101+cu130", "2.100.1", "3.0"])
def test_a_torch_that_is_new_enough_passes(found: str) -> None:
    """Versions are compared as numbers; builds before a release count as the release (FS-033)."""
    assert refusal(found) == ""


@pytest.mark.parametrize("found", ["1.13.1", "2.9", "2.10.99+cpu"])
def test_a_torch_that_is_too_old_does_not(found: str) -> None:
    """The negative control, in the words of the installation (FS-033)."""
    assert f"needs torch>=2.11, got {found}:" in refusal(found)
