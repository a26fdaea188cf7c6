"""Where a router sends prompts: to what is known, unless too much is under way there; within its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.kvcache import PrefixRouter

PAGE = 4
TEXT = list(range(100, 140))


def sent(router: PrefixRouter, tokens: list[int], among: list[str]) -> tuple[str, int]:
    """Where a request goes that ends at once, and how much of it was known there."""
    with router.open(tokens) as request:
        return request.place(among), request.cached_tokens


def test_the_longest_known_prefix_wins() -> None:
    """Of two replicas that know a prompt's beginning, the one that knows more; full pages alone count."""
    router = PrefixRouter(PAGE, request_tokens=0)
    assert sent(router, TEXT[:9], ["a"]) == ("a", 0)
    assert sent(router, TEXT[:17], ["b"]) == ("b", 0)
    assert sent(router, TEXT, ["a", "b"]) == ("b", 16)
    assert sent(router, TEXT[:9], ["a", "b"]) == ("a", 8)
    assert sent(router, [1, *TEXT[1:]], ["b", "a"]) == ("b", 0)  # nothing known: the first of equal ones
    assert sent(router, TEXT[:16], ["b"]) == ("b", 12)  # the last token is always computed


def test_what_was_drawn_is_known_for_the_next_turn() -> None:
    """A prompt that continues an answer finds the answer's pages too."""
    router = PrefixRouter(PAGE)
    with router.open(TEXT[:6]) as request:
        request.place(["a", "b"])
        request.drew()
        request.publish(TEXT[:20])
    assert sent(router, TEXT, ["b", "a"]) == ("a", 16)


def test_load_outweighs_what_is_known() -> None:
    """Requests go on to the replica that knows their prompt until others have that much less to do."""
    router = PrefixRouter(PAGE, request_tokens=10)
    assert sent(router, TEXT, ["a", "b"])[0] == "a"
    under_way = [router.open([*TEXT[:37], number]) for number in range(6)]
    places = []
    for request in under_way:
        places.append(request.place(["a", "b"]))
        request.drew()
    assert places == ["a", "a", "a", "a", "b", "b"]
    assert (router.load("a"), router.load("b")) == (40, 20)
    for request in under_way:
        request.close()
        request.close()
    assert router.load("a") == router.load("b") == 0


def test_a_prompt_that_is_still_computed_weighs_by_its_tokens() -> None:
    """Until its first token a request weighs what it has to compute, then what a request that draws does."""
    router = PrefixRouter(PAGE, request_tokens=1)
    with router.open(TEXT) as first:
        assert first.place(["a", "b"]) == "a" and router.load("a") == len(TEXT)
        assert sent(router, [5, 6, 7], ["a", "b"])[0] == "b"
        first.drew()
        first.drew()
        assert router.load("a") == 1


def test_a_request_that_lost_its_replica_weighs_at_the_next_one_alone() -> None:
    """Placed again, the first place is relieved; a replica that is forgotten knows nothing."""
    router = PrefixRouter(PAGE)
    with router.open(TEXT) as request:
        assert request.place(["a", "b"]) == "a"
        request.drew()
        router.forget("a")
        assert (len(router), request.place(["b"])) == (0, "b")
        assert (router.load("a"), router.load("b")) == (0, len(TEXT))
    assert router.load("b") == 0
    assert sent(router, TEXT, ["a", "b"]) == ("b", 36)


def test_the_index_is_bounded_and_the_least_used_goes() -> None:
    """Never more pages than the limit; a prompt that is asked for stays, with its beginning."""
    router = PrefixRouter(PAGE, max_pages=12)
    for number in range(50):
        sent(router, [number] * 17, ["a"])
        assert sent(router, TEXT[:17], ["a", "b"])[0] == "a"
        assert len(router) <= 12
    assert sent(router, TEXT[:17], ["b", "a"]) == ("a", 16)
    assert sent(router, [3] * 17, ["b", "a"]) == ("b", 0)


def test_salts_share_nothing() -> None:
    """The pages of one tenant are no reason for another's way."""
    router = PrefixRouter(PAGE)
    sent(router, TEXT, ["b"])
    with router.open(TEXT, salt=b"other") as request:
        assert (request.place(["a", "b"]), request.cached_tokens) == ("a", 0)


def test_wrong_arguments_are_named() -> None:
    """The message says which, what it needs and what it got."""
    for name in ("page_size", "max_pages"):
        with pytest.raises(ValueError, match=f"{name} needs .*got 0"):
            PrefixRouter(**{name: 0})
    with (
        pytest.raises(ValueError, match="replicas needs at least one, got none"),
        PrefixRouter().open([1]) as one,
    ):
        one.place([])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=30))
def test_loads_come_back_to_nothing(requests: list[tuple[int, int, bool]]) -> None:
    """Whatever is placed, moved and forgotten: the index keeps its count, and no load is left."""
    router = PrefixRouter(PAGE, max_pages=20)
    opened = []
    for number, length, draws in requests:
        request = router.open([number] * length)
        request.place(["a", "b", "c"])
        opened.append(request)
        if draws:
            request.drew()
            router.forget("abc"[number % 3])
            request.place(["c", "b"])
    assert len(router) == sum(map(len, router._holders.values())) <= 20
    for request in opened:
        request.close()
    assert [router.load(name) for name in "abc"] == [0, 0, 0]
