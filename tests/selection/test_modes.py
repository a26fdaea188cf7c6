"""torch's modes as bits: each of the four readers sees what changes a choice for its runtime."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layerzero.selection import modes
from layerzero.selection.modes import AUTOCAST, CAPTURE, DETERMINISTIC, GRAD, REHEARSAL

PLAIN = [modes.mode_bits, modes.capturing_mode_bits]
NO_GRAD = [modes.mode_bits_without_grad, modes.capturing_mode_bits_without_grad]


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream captures; a torch without CUDA cannot be asked."""
    monkeypatch.setattr(modes, "_is_capturing", lambda: False)


@pytest.mark.parametrize("read", [*PLAIN, *NO_GRAD])
def test_what_changes_a_choice_is_a_bit(read: Callable[[], int]) -> None:
    """Gradients count only where a runtime may differentiate, the others everywhere."""
    grad = GRAD if read in PLAIN else 0
    assert read() == grad
    with torch.no_grad():
        assert read() == 0
    with torch.autocast("cpu"):
        assert read() == grad | AUTOCAST
    torch._C._set_deterministic_algorithms(True)  # without inductor, which the public function imports
    try:
        assert read() == grad | DETERMINISTIC
        with torch.autocast("cpu"):
            assert read() == grad | DETERMINISTIC | AUTOCAST
    finally:
        torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("read", [*PLAIN, *NO_GRAD])
def test_a_rehearsal_plans_as_a_capture_does(read: Callable[[], int]) -> None:
    """On a device that captures graphs, and on no other."""
    before = read()
    REHEARSAL.on = True
    try:
        assert read() == before | (CAPTURE if read in (PLAIN[1], NO_GRAD[1]) else 0)
    finally:
        REHEARSAL.on = False
