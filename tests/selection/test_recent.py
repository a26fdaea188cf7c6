"""What is dropped where there is no more room: what was not used last, never what is used all the time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.selection.recent import RecentCache


@pytest.mark.parametrize("limit", [2, 3, 16, 17])
def test_a_key_in_use_outlives_all_others(limit: int) -> None:
    """Used after every insertion it is never lost; of the others no more than there is room for stay."""
    recent: RecentCache[str, int] = RecentCache(limit)
    recent.put("hot", 0)
    for number in range(200):
        recent.put(str(number), number)
        assert recent.get("hot") == 0 or limit < 4
        assert len(recent) <= limit
    if limit > 3:
        assert "199" in recent and "0" not in recent


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=80))
def test_it_holds_what_was_used_while_half_the_room_was_filled(
    limit: int, steps: list[tuple[int, bool]]
) -> None:
    """A value that is found is the last one put; keys of the last half of the room are all found."""
    recent: RecentCache[int, int] = RecentCache(limit)
    last: dict[int, int] = {}
    order: list[int] = []
    for moment, (key, puts) in enumerate(steps):
        if puts:
            recent.put(key, moment)
            last[key] = moment
        elif recent.get(key) is None:
            continue
        order = [known for known in order if known != key] + [key]
        assert len(recent) <= limit and set(recent) == {key for key, _ in recent.items()}
    for key, value in recent.items():
        assert last[key] == value
    for key in order[-(limit // 2) :] if limit > 1 else ():
        assert key in recent


def test_no_room_keeps_nothing_and_one_keeps_one() -> None:
    """0 is off; with room for one the newest stays."""
    off: RecentCache[str, int] = RecentCache(0)
    off.put("a", 1)
    assert len(off) == 0 and off.get("a") is None and "a" not in off
    one: RecentCache[str, int] = RecentCache(1)
    for key in "abc":
        one.put(key, 1)
        assert list(one) == [key]
