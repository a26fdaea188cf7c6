"""What an explanation shows of a choice, and in which order."""

from __future__ import annotations

from layerzero.selection.record import Accepted, Candidate, format_bytes, rank_candidates
from layerzero.spec.reasons import Reason, Rejected


def accepted(name: str, kernel_us: float, transform_us: float = 0.0, factor: float = 1.0) -> Candidate:
    """A kernel that takes the call."""
    total = (kernel_us + transform_us) * factor
    return Candidate(name, name.partition(".")[0], Accepted(kernel_us, transform_us, total, "a test"))


def refused(name: str, reasons: int) -> Candidate:
    """A kernel that refuses it for so many reasons."""
    reason = Rejected(Reason.MISALIGNED, "alignment", "64", "1")
    return Candidate(name, name.partition(".")[0], None, (reason,) * reasons)


def test_kernels_are_shown_from_the_chosen_to_the_least_able() -> None:
    """By the whole price, transforms and boosts included, as they were compared; then by reasons against."""
    trace = [
        refused("far.op", 3),
        accepted("copied.op", 1.0, transform_us=9.0),
        refused("near.op", 1),
        accepted("boosted.op", 40.0, factor=0.1),
        accepted("plain.op", 5.0),
        accepted("chosen.op", 99.0),
    ]
    shown = [candidate.kernel for candidate in rank_candidates(trace, "chosen.op")]
    assert shown == ["chosen.op", "boosted.op", "plain.op", "copied.op", "near.op", "far.op"]


def test_bytes_are_for_people() -> None:
    """Three digits at most below a tebibyte."""
    sizes = (0, 1023, 1024, 10 << 10, 3 << 29, 5 << 50)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "10 KiB",
        "1.5 GiB",
        "5120 TiB",
    ]
