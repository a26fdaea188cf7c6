"""Whether captured graphs give the tokens of the loop by hand: the same step of the same sequences by both.

Kernels round differently, so that two words of nearly one score may change places; a token counts as the
loop's where the loop's own logits put it within `NEAR` of their best.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from models.llama import SampleArgs
from torch import Tensor

from generating import by_hand
from layerzero.kvcache import TokenRange

# In spreads of a row's logits. The best of 128,256 words stands some four of them above the mean, and
# bfloat16 steps by a thirtieth of one there.
NEAR = 0.25
FEWEST = 0.5  # of the rows have the very token


class Graph(Protocol):
    """A model that answers for all callers at once."""

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor: ...


def agreement(cache: by_hand.Paged, graph: Graph, context: int, requests: int) -> dict[str, Any]:
    """The share of `requests` sequences behind `context` tokens that go on alike, and the largest distance.

    Raises: ValueError: a token is not the loop's.
    """
    model = cache.model
    ids = torch.arange(requests, device=model.cache.device) % model.config.vocab_size
    draws = [SampleArgs(0.0, 1.0, number, 0) for number in range(requests)]
    with ExitStack() as stack:
        sequences = [stack.enter_context(model.sequence(context + 1)) for _ in range(requests)]
        cache.join(sequences, [context] * requests)
        logits = by_hand.step(cache, ids).float()
        tokens = graph.sample_next_batch(
            ids, [TokenRange(sequence, context, 1) for sequence in sequences], draws
        )
    best = logits.max(-1)
    short = best.values - logits.gather(1, tokens.long()[:, None])[:, 0]
    distance = float((short / logits.std(-1)).max())
    same = int((tokens == best.indices).sum())
    if not distance <= NEAR or same < FEWEST * requests:
        raise ValueError(
            f"tokens need to be within {NEAR} of the loop's best, and {FEWEST:.0%} of them alike, "
            f"got {distance:.3f}, and {same} of {requests}"
        )
    return {"same": same, "of": requests, "largest_distance": round(distance, 4), "bound": NEAR}
