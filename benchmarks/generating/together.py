"""Completions of several requests as one job: what a server that batches whole requests puts around a model.

The forward is the example's own, prompts and tokens alike; who has ended leaves the batch, and all answers
are given when the last one is done.
"""

from __future__ import annotations

from typing import Any

import torch
from models.llama import Llama, SampleArgs

Asked = dict[str, Any]


def complete(model: Llama, asked: list[Asked]) -> list[Asked]:
    """Each request's tokens, at a temperature of 0; `batch` says how many were served together."""
    with torch.inference_mode():
        return _complete(model, asked)


def _complete(model: Llama, asked: list[Asked]) -> list[Asked]:
    given: list[list[int]] = [[] for _ in asked]
    sequences = [model.sequence(len(one["prompt"]) + one["max_tokens"]) for one in asked]
    try:
        live = list(range(len(asked)))
        ids = torch.tensor([token for one in asked for token in one["prompt"]])
        spans = [s.extend(len(one["prompt"])) for s, one in zip(sequences, asked, strict=True)]
        while live:
            draws = [SampleArgs(0.0, 1.0, 0, len(given[index])) for index in live]
            drawn = model.sample_next_batch(ids, spans, draws)
            for index, token in zip(live, drawn.tolist(), strict=True):
                given[index].append(token)
            kept = [
                place
                for place, index in enumerate(live)
                if len(given[index]) < asked[index]["max_tokens"]
                and given[index][-1] not in model.config.eos_token_ids
            ]
            ids, live = drawn[kept], [live[place] for place in kept]
            spans = [sequences[index].extend() for index in live]
    finally:
        for sequence in sequences:
            sequence.close()
    return [{"tokens": len(tokens), "batch": len(asked)} for tokens in given]
