"""One coroutine a request: an ordinary loop over tokens that meets all other requests in batches."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from models.llama import FOLDER, Llama, SampleArgs
from tokenizers import Tokenizer
from torch import Tensor

import layerzero as lz
from layerzero.ops.host_copies import to_device_with_host_copy

# Rows of a prompt that one step takes: longer prompts go in pieces, so that no request waits long for its
# next token.
PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request wants its tokens drawn; the same seed draws the same tokens in any company.

    Raises: ValueError: a value is out of range, by name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: random.getrandbits(62))

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens needs at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature needs 0 to 2, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p needs to be above 0 and at most 1, got {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed needs 64 bits with a sign, got {self.seed}")


async def generate(model: Llama, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[int, None]:
    """Yield the tokens that continue `prompt`, until one ends the text or `max_tokens` are drawn.

    Cancelled or closed, it takes its call back from the batcher and gives its pages back.
    Raises: PagesExhaustedError: the pool is full. ValueError: the prompt is empty, or too long.
    """
    if not prompt:
        raise ValueError("prompt needs at least one token, got none")
    device = model.cache.device
    with model.sequence(len(prompt) + params.max_tokens) as sequence:
        *chunks, ids = to_device_with_host_copy(torch.tensor(prompt), device).split(PREFILL_CHUNK)
        for chunk in chunks:
            await model.step(chunk, sequence.extend(len(chunk)))
        drawn = itertools.count()

        async def step(ids: Tensor) -> Tensor:
            draw = SampleArgs(params.temperature, params.top_p, params.seed, next(drawn))
            return await model.sample_next(ids, sequence.extend(len(ids)), draw)

        async with contextlib.aclosing(lz.run_ahead(step, ids, max_steps=params.max_tokens)) as tokens:
            async for token in tokens:
                number = int(token)
                yield number
                if number in model.config.eos_token_ids:
                    return


def load_tokenizer(folder: Path = FOLDER) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
