"""What the samples of `benchmarks/selection_share.py` count as choosing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def share() -> ModuleType:
    path = ROOT / "benchmarks" / "selection_share.py"
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location("selection_share", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def frame_in(path: str) -> FrameType:
    """The frame of a function of the file `path`, called from another file's, which is this one."""
    names: dict[str, Any] = {"now": sys._getframe}
    exec(compile("def here():\n    return (lambda: now())()", path, "exec"), names)
    found: FrameType = names["here"]()
    return found


@pytest.mark.parametrize(
    ("path", "choosing"),
    [
        ("selection/decide.py", True), ("policy/policy.py", True), ("health/board.py", True),
        ("dispatch.py", True), ("lanes.py", False), ("backends/torch_kernels/sdpa.py", False),
        ("ops/norm.py", False),
    ],
)  # fmt: skip
def test_a_sample_is_of_choosing_by_the_files_on_its_stack(
    share: ModuleType, path: str, choosing: bool
) -> None:
    """Selection, policy, health and the table of plans count wherever they are; kernels and batchers do
    not."""
    assert share.chooses(frame_in(str(share.LIBRARY / path))) is choosing
    assert share.chooses(None) is False
