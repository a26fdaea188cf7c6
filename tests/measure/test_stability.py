"""Two tunes of one machine name the same winners, whatever its host does between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.measure.compare import host_ratio, winner_changes
from layerzero.measure.timing import Timing
from layerzero.measure.tuner import TuningResult, pick_winner, tied_with
from layerzero.perfdb.record import Launch
from layerzero.selection.context import SelectionOptions
from tests.kernels import kernel

BAND = 0.05
# Causal attention of 32 heads over 512 tokens on an H200, microseconds: two tunes, a second apart; replays.
FIRST = {"sdpa": 33.05, "cudnn": 36.52, "efficient": 29.92, "flash": 31.69, "third": 78.60, "fourth": 189.63}
SECOND = {"sdpa": 21.70, "cudnn": 23.96, "efficient": 29.91, "flash": 20.31, "third": 48.10, "fourth": 124.85}
REPLAYED = {"sdpa": 10.95, "cudnn": 10.97, "efficient": 28.31, "flash": 14.17, "third": 14.25, "fourth": 9.44}


def tuned(times: dict[str, float], launch: Launch, spread: float = 0.005) -> TuningResult:
    """A tune whose kernels took about these times, decided as tuning decides."""
    timings = {
        name: Timing(tuple(us * (1 + spread * (n - 4) / 4) for n in range(9)), "cold")
        for name, us in times.items()
    }
    winner, tied = pick_winner(
        times, {name: kernel(f"{name}.attention") for name in times}, SelectionOptions()
    )
    best = min(times, key=times.__getitem__)
    return TuningResult(
        call="c", op="attention", launch=launch, winner=winner, best=best, times_us=times, timings=timings,
        tied=tuple(sorted({*tied, *tied_with(best, timings, BAND)})), band=BAND,
    )  # fmt: skip


def outside(first: dict[str, float], second: dict[str, float], *replayed: dict[str, float]) -> list[bool]:
    """Whether each change between two tunes is outside the band; `replayed` in either of them."""
    own, other = replayed or (REPLAYED, REPLAYED)
    found = winner_changes(
        [tuned(first, "eager"), tuned(own, "graph")], [tuned(second, "eager"), tuned(other, "graph")]
    )
    assert found[0] == 2, "both launches are compared"
    return [change.outside for change in found[1] if change.launch == "eager"]


def test_a_host_that_changes_its_speed_changes_no_winner_outside_the_band() -> None:
    """Five kernels became faster at once and pass one that waits for the device: the host did, not they."""
    assert host_ratio(FIRST, SECOND, REPLAYED) == pytest.approx(20.31 / 31.69, rel=0.05)
    _, [change] = winner_changes(
        [tuned(FIRST, "eager"), tuned(REPLAYED, "graph")], [tuned(SECOND, "eager"), tuned(REPLAYED, "graph")]
    )
    assert (change.first, change.second, change.outside) == ("efficient", "flash", False)
    assert change.host == pytest.approx(0.65, abs=0.03)
    assert outside(SECOND, FIRST) == [False], "whichever came first"


def test_one_kernel_that_changes_alone_is_told() -> None:
    """No host explains why one kernel takes half as long; one kernel alone speaks of no host."""
    assert outside(FIRST, FIRST | {"flash": 15.0}) == [True]
    alone, replayed = {"flash": 31.0, "efficient": 29.9}, {"flash": 14.0, "efficient": 28.3}
    assert host_ratio(alone, alone | {"flash": 20.0}, replayed) == 1.0
    assert outside(alone, alone | {"flash": 20.0}, replayed, replayed) == [True]


def test_a_kernel_that_takes_longer_on_the_device_is_told() -> None:
    """A slower host hides nothing that the replays show."""
    slow = {name: us * 1.5 for name, us in REPLAYED.items()} | {"flash": 45.0}
    before = {"flash": 20.3, "sdpa": 22.0, "third": 48.0, "fourth": 124.0}
    after = {"flash": 47.0, "sdpa": 33.0, "third": 72.0, "fourth": 186.0}
    first, second = ({k: own[k] for k in before} for own in (REPLAYED, slow))
    assert outside(before, after, first, second) == [True]


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[str, float], dict[str, float]]:
    """Kernels by what the host and what the device takes for them; three at least wait for the host."""
    names = ["a", "b", "c", "d", "e", "f"][: draw(st.integers(4, 6))]
    device = {name: draw(st.floats(10.0, 100.0)) for name in names}
    host = {name: draw(st.floats(10.0, 150.0)) for name in names}
    host |= {name: device[name] * draw(st.floats(1.4, 4.0)) for name in names[:3]}
    return host, device


@given(machines(), st.floats(1.0, 1.6), st.floats(1.0, 1.6), st.randoms(use_true_random=False))
def test_noise_as_recorded_gives_no_flip_outside_the_band(
    machine: tuple[dict[str, float], dict[str, float]], one: float, other: float, draw: random.Random
) -> None:
    """Two tunes at any two speeds of the host, half a per cent of noise: what differs is inside the band."""
    host, device = machine

    def tune(speed: float) -> list[TuningResult]:
        replayed = {name: us * draw.uniform(0.995, 1.005) for name, us in device.items()}
        waited = {name: max(us * speed, 1.02 * device[name] + 1.5) for name, us in host.items()}
        eager = {name: us * draw.uniform(0.995, 1.005) for name, us in waited.items()}
        return [tuned(eager, "eager"), tuned(replayed, "graph")]

    _, found = winner_changes(tune(one), tune(other))
    assert not [change for change in found if change.outside]
