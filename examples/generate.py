"""One coroutine a request: an ordinary loop over tokens that meets all other requests in batches."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from models.llama import FOLDER, Llama, SampleArgs
from tokenizers import Tokenizer

import layerzero as lz
from layerzero.ops.host_copies import to_device_with_host_copy

# Rows of a prompt that one step takes: longer prompts go in pieces, so that no request waits long for its
# next token.
PREFILL_CHUNK = 256
_HALF = "\ufffd"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request wants its tokens drawn; the same seed draws the same tokens in any company.

    Raises: ValueError: a value is out of range, by name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: random.getrandbits(62))
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens needs at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature needs 0 to 2, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p needs to be above 0 and at most 1, got {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed needs 64 bits with a sign, got {self.seed}")
        if len(self.stop) > 4 or "" in self.stop:
            raise ValueError(f"stop needs at most 4 strings, none of them empty, got {list(self.stop)}")


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
        for drawn in range(params.max_tokens):
            draw = SampleArgs(params.temperature, params.top_p, params.seed, drawn)
            ids = await model.sample_next(ids, sequence.extend(len(ids)), draw)
            number = int(await lz.to_host(ids))
            yield number
            if number in model.config.eos_token_ids:
                return


class IncrementalDetokenizer:
    """Tokens into text, piece by piece: whole characters only, nothing of a stop string.

    A token's text depends on the ones before it, so each is decoded behind the last few that are known.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._prefix_offset = self._read_offset = (
            0  # ids from _behind on are decoded, those before _known are in _text
        )
        self._text = ""
        self._num_released = 0
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._ids.append(token)
        self._take(whole=True)
        return self._release(self._num_held_back())

    def end(self) -> str:
        """What was held back at the end of the text."""
        if self.stopped:
            return ""
        self._take(whole=False)
        return self._release(0)

    def _take(self, whole: bool) -> None:
        """Add the text of the ids that are not in it yet; a character that is only half there waits."""
        before = self._tokenizer.decode(self._ids[self._prefix_offset : self._read_offset])
        after = self._tokenizer.decode(self._ids[self._prefix_offset :])
        if whole and after.endswith(_HALF):
            return
        self._text += after[len(before) :]
        self._prefix_offset, self._read_offset = self._read_offset, len(self._ids)

    def _release(self, num_held_back: int) -> str:
        """Give what no stop string begins in; `held` characters at the end wait for what follows."""
        ends = [
            position
            for position in (self._text.find(stop, self._num_released) for stop in self._stop)
            if position >= 0
        ]
        self.stopped = bool(ends)
        upto = min(ends) if ends else len(self._text) - num_held_back
        piece = self._text[self._num_released : upto]
        self._num_released = max(self._num_released, upto)
        return piece

    def _num_held_back(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = 0
        for stop in self._stop:
            sizes = range(min(len(stop) - 1, len(self._text)), longest, -1)
            longest = next((size for size in sizes if self._text.endswith(stop[:size])), longest)
        return longest


def load_tokenizer(folder: Path = FOLDER) -> Tokenizer:
    """The tokenizer of a Hugging Face folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
