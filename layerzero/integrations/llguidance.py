"""Texts that a JSON schema or a regular expression allows: masks for `lz.adjust_logits`, by llguidance.

    grammars = Grammars(Path("tokenizer.json").read_text(), vocab_size, eos_token_ids)
    grammar = grammars.json_schema({"type": "object"})
    logits = lz.adjust_logits(logits, allowed=grammar.allowed().unsqueeze(0))
    ...                                    # draw a token
    grammar.accept(token)

Needs `pip install "layerzero-runtime[grammar]"`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from layerzero.spec.errors import GrammarLimitError

MASK_BITS = 32
# Between the parts of a JSON text: a model that may write any space can write spaces forever.
_SPACES: Any = {"whitespace_pattern": "[ \\n]"}


class Grammar:
    """Where one text is in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words
        self._mask: Tensor | None = None

    def copy(self) -> Grammar:
        """A grammar for another text, which is where this one is."""
        return Grammar(self._matcher.deep_copy(), self._words)

    def allowed(self) -> Tensor:
        """The tokens that may come next, a bit each: (ceil(V / 32),) int32 on the CPU.

        An end of the text is among them where the grammar is complete.
        Raises: GrammarLimitError: the grammar takes more work than llguidance's limits allow.
        """
        mask = bytearray(self._matcher.compute_bitmask())
        self._need_sound()
        self._mask = torch.frombuffer(mask, dtype=torch.int32)[: self._words]
        return self._mask

    def accept(self, token: int) -> None:
        """Continue after `token`.

        Raises: ValueError: the grammar does not allow it here, or has ended. GrammarLimitError: it was
            allowed, and takes more work than llguidance's limits do.
        """
        mask, self._mask = self._mask, None
        if not self._matcher.consume_token(token):
            if mask is not None and token in _tokens(mask):
                self._need_sound()
            raise ValueError(f"token needs one that the grammar allows here, got {token}")

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but an end of the text."""
        return bool(self._matcher.is_stopped())

    def _need_sound(self) -> None:
        if self._matcher.is_error():
            raise GrammarLimitError(
                f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}"
            )


class Grammars:
    """Grammars over one tokenizer; compiling one gives the interpreter up, so that a thread may do it."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`tokenizer` is the text of a tokenizer.json; the model's logits are `vocab_size` wide.

        Raises: ModuleNotFoundError: llguidance is not installed. ValueError: no token ends a text.
        """
        ends = sorted(eos_token_ids)
        if not ends:
            raise ValueError("eos_token_ids needs at least one token that ends a text, got none")
        self._library = importlib.import_module("llguidance")
        self._tokenizer = self._library.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        self._words = -(-vocab_size // MASK_BITS)

    def json_schema(self, schema: dict[str, Any] | bool) -> Grammar:
        """Texts that are JSON of `schema`.

        Raises: ValueError: llguidance does not know the schema, or a part of it.
        """
        if not isinstance(schema, dict | bool):
            raise ValueError(f"schema needs an object, got {type(schema).__name__}")
        as_object = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
        return self._compiled(
            "schema", self._library.LLMatcher.grammar_from_json_schema(as_object, defaults=_SPACES)
        )

    def regex(self, pattern: str) -> Grammar:
        """Texts that the whole of `pattern` matches, in the syntax of Rust's regex.

        Raises: ValueError: `pattern` is no such expression, or too large.
        """
        if not isinstance(pattern, str):
            raise ValueError(f"regex needs a string, got {type(pattern).__name__}")
        return self._compiled("regex", self._library.LLMatcher.grammar_from_regex(pattern))

    def _compiled(self, name: str, grammar: str) -> Grammar:
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(
                f"{name} needs a grammar that llguidance takes: {_first_line(matcher.get_error())}"
            )
        compiled = Grammar(matcher, self._words)
        try:
            compiled.allowed()  # the first mask takes longest, and shows a grammar of no text at all
        except GrammarLimitError as error:
            raise ValueError(f"{name} needs a grammar that can be followed: {error}") from error
        return compiled


def _tokens(mask: Tensor) -> list[int]:
    bits = mask.unsqueeze(1) >> torch.arange(MASK_BITS, device="cpu") & 1
    return bits.flatten().nonzero().flatten().tolist()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
