"""What an attempt to capture a kernel showed, and what follows from it; pure, so that any machine can ask."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

# Relative L2 difference between a replay and the kernel called directly on the same inputs, in units in the
# last place of the output's dtype: split sums may be added in another order, nothing else may differ.
REPLAY_ULPS = 8.0


class CaptureProblem(StrEnum):
    """Why a kernel may not run while a graph is captured."""

    RAISED = "raised"
    SYNCHRONISED = "synchronised"
    CAPTURE_FAILED = "capture failed"
    ALLOCATED_OUTSIDE = "allocated outside the graph's pool"
    REPLAY_DIFFERS = "replay differs"
    INPUTS_IGNORED = "changed inputs were not seen"
    NOT_SHOWN = "not shown"


class CaptureFinding(msgspec.Struct, frozen=True):
    """One problem and what was seen of it."""

    problem: CaptureProblem
    seen: str = ""

    def __str__(self) -> str:
        return f"{self.problem.value}: {self.seen}" if self.seen else self.problem.value


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen on one stream; bytes are of device memory, differences relative L2 norms.

    raised: the error of a plain call, with which everything else ends.
    synchronised: the error of a call under torch's check for synchronising operations.
    capture_error: the error of the capture itself.
    outside_bytes: what the kernel allocated during the capture outside the graph's pool.
    replays: for each replay, its difference from a direct call on the same inputs.
    repeats: the same difference between two direct calls on the same inputs.
    changed: the difference between the results of direct calls on the first and on the changed inputs.
    eps: the spacing of the output's dtype at 1.
    """

    stream: int = 0
    raised: str = ""
    synchronised: str = ""
    capture_error: str = ""
    outside_bytes: int = 0
    replays: tuple[float, ...] = ()
    repeats: float = 0.0
    changed: float = 0.0
    eps: float = 0.0


def find_problems(observation: Observation) -> tuple[CaptureFinding, ...]:
    """Every problem that an observation shows; an empty tuple is the proof that capturing is safe."""
    seen = observation
    for text, problem in (
        (seen.raised, CaptureProblem.RAISED),
        (seen.synchronised, CaptureProblem.SYNCHRONISED),
        (seen.capture_error, CaptureProblem.CAPTURE_FAILED),
    ):
        if text:
            return (CaptureFinding(problem, text),)
    return tuple(_problems_of_replays(seen))


def _problems_of_replays(seen: Observation) -> Iterator[CaptureFinding]:
    if seen.outside_bytes:
        yield CaptureFinding(CaptureProblem.ALLOCATED_OUTSIDE, f"{seen.outside_bytes} bytes")
    bound = REPLAY_ULPS * seen.eps
    # A NaN is no difference that can be compared: it fails, as it must.
    if not seen.repeats <= bound:
        yield CaptureFinding(CaptureProblem.NOT_SHOWN, f"two direct calls differ by {seen.repeats:.3g}")
    elif not seen.replays:
        yield CaptureFinding(CaptureProblem.NOT_SHOWN, "nothing was replayed")
    elif not all(difference <= bound for difference in seen.replays):
        difference = f"by {max(seen.replays):.3g}, needs <= {bound:.3g}"
        yield CaptureFinding(CaptureProblem.REPLAY_DIFFERS, difference)
    if not seen.changed > bound:
        yield CaptureFinding(CaptureProblem.INPUTS_IGNORED, f"results differ by {seen.changed:.3g}")
