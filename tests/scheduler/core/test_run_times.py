"""What a batch is expected to take by its tokens."""

from __future__ import annotations

import random

import pytest

from layerzero.scheduler.core.run_times import RunTimes


def test_a_line_is_found_through_batches_of_two_kinds() -> None:
    """Steps of next tokens alone, and steps with prompts: each is expected to take its own time."""
    times, draw = RunTimes(), random.Random(1)
    for _ in range(200):
        tokens = draw.choice([64, 60, draw.randint(300, 1024)])
        times.add(tokens, (5e-3 + 22e-6 * tokens) * draw.uniform(0.97, 1.03))
    for tokens in (64, 512, 1024):
        assert times.of(tokens) == pytest.approx(5e-3 + 22e-6 * tokens, rel=0.05)


def test_nothing_is_known_of_no_batch() -> None:
    """Zero says so."""
    assert RunTimes().of(5) == 0.0


def test_batches_of_one_size_tell_nothing_of_others() -> None:
    """Without a second size a batch of any takes the usual time."""
    times = RunTimes()
    for _ in range(50):
        times.add(64, 6e-3)
    assert times.of(64) == times.of(4096) == pytest.approx(6e-3)


def test_more_tokens_never_take_less() -> None:
    """A slope that noise turned is none, and a small batch takes some time."""
    times = RunTimes()
    for tokens, seconds in ((10, 9e-3), (1000, 5e-3)) * 20:
        times.add(tokens, seconds)
    assert times.of(1) <= times.of(1000)
    steep = RunTimes()
    for tokens in (1000, 2000) * 40:
        steep.add(tokens, 1e-5 * (tokens - 900))
    assert steep.of(1) > 0.0


def test_what_a_device_needs_now_counts_more_than_what_it_needed() -> None:
    """Other work beside it makes every batch slower: soon that is what is expected."""
    times = RunTimes()
    for slow in (1, 3):
        for tokens in (64, 1024) * 60:
            times.add(tokens, slow * (5e-3 + 22e-6 * tokens))
    assert times.of(1024) == pytest.approx(3 * (5e-3 + 22e-6 * 1024), rel=0.05)
