"""A sharded Llama over gloo whose requests run one step in front of their readers: the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import forked

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

SCRIPT = Path(__file__).with_name("ahead.py")


def said_of(ranks: int, folder: Path, padded: bool) -> dict[str, Any]:
    """What rank 0 found."""
    only = {rank: {"PADDED": str(int(padded))} for rank in range(ranks)}
    ended = forked.run_ranks(ranks, [str(SCRIPT)], folder, 170, only)
    assert [each.returncode for each in ended] == [0] * ranks, ended
    lines = [json.loads(line) for each in ended for line in each.stdout.splitlines() if line[:1] == "{"]
    (first,) = [line for line in lines if line["rank"] == 0]
    found: dict[str, Any] = first
    return found


@pytest.mark.parametrize(
    ("ranks", "padded"),
    [pytest.param(2, True, id="2-padded"), pytest.param(4, False, id="4", marks=pytest.mark.slow)],
)
def test_reading_behind_changes_no_token_and_no_page_is_lost(
    ranks: int, padded: bool, tmp_path: Path
) -> None:
    """Greedy and drawn requests of other lengths, one of which stops in the middle; beside one process."""
    said = said_of(ranks, tmp_path, padded)
    assert said["ahead"] == said["first"] == said["alone"]
    last = said["alone"][-1]
    stopped = [*said["alone"][:-1], last[: last.index(last[2]) + 1]]
    assert said["stopped"] == stopped and len(stopped[-1]) < len(last)
    assert said["leaked"] == 0
    check_order(said["events"])


def check_order(events: list[list[Any]]) -> None:
    """A request's next step is announced before its token is read; no token is brought once it decodes."""
    names: dict[Any, int] = {}
    steps = {number: 0 for number in range(4)}
    of_all = {number: sum(event[:2] == ["read", number] for event in events) for number in steps}
    for what, *rest in events:
        if what == "sent":
            requests, counts, brought = rest
            numbers = [names.setdefault(request, len(names)) for request in requests]
            assert brought is any(not steps[number] for number in numbers), (numbers, counts)
            for number in numbers:
                steps[number] += 1
        else:
            number, read = rest
            assert steps[number] >= min(read + 1, of_all[number]), f"token {read} of {number} came too early"
    assert steps == of_all, "a step is a token"
