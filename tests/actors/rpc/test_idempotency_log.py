"""The ledger of requests: random losses, repeats and late arrivals never run a request twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.actors.rpc.idempotency_log import AcknowledgedError, IdempotencyLog
from layerzero.actors.rpc.settling import RequestNumbers

EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "repeat", "settle", "late"]), st.integers(0, 30)), max_size=120
)


@given(EVENTS)
def test_no_history_runs_a_request_twice(history: list[tuple[str, int]]) -> None:
    """Executions are at most as many as distinct requests, and each that arrived unsettled ran once."""
    ledger: IdempotencyLog[int] = IdempotencyLog()
    numbers = RequestNumbers()
    ran: dict[int, int] = {}
    sent: list[int] = []

    def arrive(number: int, floor: int) -> None:
        try:
            entry = ledger.find("client", number, floor)
        except AcknowledgedError:
            return
        if entry is None:
            ledger.add("client", number, number)
            ran[number] = ran.get(number, 0) + 1
        else:
            assert entry == number

    for what, pick in history:
        if what == "send":
            number = numbers.new_number()
            sent.append(number)
            arrive(number, numbers.ack_watermark)
        elif sent and what == "repeat":
            number = sent[pick % len(sent)]
            if numbers.is_outstanding(number):
                arrive(number, numbers.ack_watermark)
        elif sent and what == "settle":
            number = sent[pick % len(sent)]
            if numbers.is_outstanding(number):
                numbers.ack(number)
                ledger.ack("client", numbers.take_acks())
        elif sent:  # a copy that was long on its way, with the floor of its time
            arrive(sent[pick % len(sent)], 0)
    assert set(ran) == set(sent)
    assert all(times == 1 for times in ran.values())
    assert ledger.executions == len(sent)


def test_memory_is_bounded_by_what_is_outstanding() -> None:
    """A thousand settled requests leave nothing behind but the floor."""
    ledger: IdempotencyLog[str] = IdempotencyLog()
    numbers = RequestNumbers()
    for _ in range(1000):
        number = numbers.new_number()
        assert ledger.find("c", number, numbers.ack_watermark) is None
        ledger.add("c", number, "entry")
        numbers.ack(number)
    ledger.find("c", numbers.new_number(), numbers.ack_watermark)
    assert ledger.entries() == []
    with pytest.raises(AcknowledgedError):
        ledger.find("c", 5, numbers.ack_watermark)


def test_a_request_that_was_cancelled_before_it_came_never_runs() -> None:
    """Settling comes first, the request later."""
    ledger: IdempotencyLog[str] = IdempotencyLog()
    assert ledger.ack("c", (3,)) == []
    with pytest.raises(AcknowledgedError):
        ledger.find("c", 3, 0)
    assert ledger.find("c", 4, 0) is None
