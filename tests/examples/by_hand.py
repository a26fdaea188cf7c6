"""What the server should answer, computed token by token without it: one sequence, one formula, no cache."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Sequence

import layerzero as lz

Rule = Callable[[list[float], list[int], int], list[float]]


class ByHand:
    """The model of the checkout, asked for one token after the other with the whole text each time."""

    def __init__(self) -> None:
        from generate import load_tokenizer
        from models import llama

        self.model, self.tokenizer = llama.load(pages=64), load_tokenizer()
        # One runtime for all calls, in a context of its own: what one has planned the next one need not.
        self._context = contextvars.copy_context()
        self._runtime = lz.start(lz.Settings(device="cpu", inference=True, warm="off"), scoped=True)
        self._context.run(self._runtime.__enter__)

    def close(self) -> None:
        """Close its runtime."""
        self._context.run(self._runtime.__exit__, None, None, None)

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """What follows `tokens`, from an empty cache."""
        return self._context.run(self._logits, tokens)

    def _logits(self, tokens: Sequence[int]) -> list[float]:
        import torch

        with self.model.sequence(len(tokens)) as sequence:
            span = sequence.extend(len(tokens))
            logits: list[float] = self.model.step_batch(torch.tensor(tokens), [span])[0].double().tolist()
        return logits

    def greedy(self, prompt: Sequence[int], count: int, rule: Rule | None = None) -> list[int]:
        """The likeliest token behind the likeliest token, after `rule(logits, tokens, prompt's length)`."""
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(tokens)
            if rule is not None:
                logits = rule(logits, tokens, len(prompt))
            tokens.append(logits.index(max(logits)))
            if tokens[-1] in self.model.config.eos_token_ids:
                break
        return tokens[len(prompt) :]

    def logprobs(self, tokens: Sequence[int], start: int) -> list[list[float]]:
        """The logarithms of all tokens' probabilities at each place from `start` on."""
        rows = []
        for end in range(start, len(tokens)):
            logits = self.logits(tokens[:end])
            total = math.log(sum(math.exp(value) for value in logits))
            rows.append([value - total for value in logits])
        return rows

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens behind a prompt."""
        text: str = self.tokenizer.decode(list(tokens))
        return text

    def ids(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids


def penalised(
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
) -> Rule:
    """The rules of the API, a token at a time."""

    def rule(logits: list[float], tokens: list[int], prompt: int) -> list[float]:
        adjusted = []
        for token, value in enumerate(logits):
            value += (bias or {}).get(token, 0.0)
            if token in tokens:
                value = value / repetition if value > 0 else value * repetition
            count = tokens[prompt:].count(token)
            adjusted.append(value - frequency * count - (presence if count else 0.0))
        return adjusted

    return rule
