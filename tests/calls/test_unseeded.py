"""A draw without a seed draws anew with each call, from torch's generator, once a call, on both paths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import layerzero as lz
from tests.native.twins import both_paths as both_paths

LOGITS = torch.zeros(64, 1000)
PROBS = torch.full((4, 3, 50), 0.02)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sample": ((LOGITS,), {}),
    "sample_topk": ((LOGITS, 900), {}),
    "sample_topp": ((LOGITS, 0.9), {}),
    "verify_chain": ((PROBS, torch.zeros(4, 3, dtype=torch.int64), torch.rand(4, 4, 50).softmax(-1)), {}),
}


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """A choice that does not change when something has been loaded in the background."""
    with lz.start(lz.Settings(warm="off")):
        yield


def drawn(way: str, name: str) -> torch.Tensor:
    """The tokens of one call."""
    args, named = CALLS[name]
    if way == "awaited":
        result = asyncio.run(getattr(lz, name)(*args, **named))
    elif way == "operator":
        result = getattr(torch.ops.layerzero, name)(*args, **named)
    else:
        result = getattr(lz.sync, name)(*args, **named)
    tokens: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tokens


@pytest.mark.parametrize("way", ["blocking", "awaited", "operator"])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_call_draws_anew_and_manual_seed_repeats_the_program(name: str, way: str) -> None:
    """Four calls differ from each other; the same four come again, the first call of a runtime included."""
    programs = []
    for _ in range(3):
        torch.manual_seed(11)
        programs.append([drawn(way, name) for _ in range(4)])
    first, second, third = programs
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    if name != "verify_chain":
        assert len({tuple(tokens.tolist()) for tokens in first}) == 4
    after = torch.random.get_rng_state()
    torch.manual_seed(11)
    for _ in range(4):
        torch.randint(1 << 62, ())
    assert torch.equal(after, torch.random.get_rng_state())
