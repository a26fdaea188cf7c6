"""A process may end while a better kernel is being loaded in the background."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import time, torch, layerzero as lz
x, w = torch.randn(4, 16), torch.randn(16, 16)
lz.sync.linear(x, w); lz.sync.rms_norm(x); q = torch.randn(1, 2, 4, 8); lz.sync.attention(q, q, q)
time.sleep({delay})
"""


@pytest.mark.parametrize("delay", [0.0, 0.09, 0.11, 0.3])
def test_a_process_ends_cleanly_while_a_kernel_loads(delay: float) -> None:
    """Before the load begins, as it begins and in the middle of it: exit status 0 and no abort."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(delay=delay)], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
