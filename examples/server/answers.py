"""Answers in the words of OpenAI's API: whole or in pieces, as a completion or as a chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import layerzero as lz
from server.engine import Drawn


@dataclass(frozen=True, slots=True)
class TokenLog:
    """One token of an answer with log probabilities, and where its text begins in the choice's."""

    offset: int
    drawn: Drawn


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a choice: its text, its tokens if they were asked for, and why it ended, if it did."""

    index: int
    text: str
    tokens: tuple[TokenLog, ...] = ()
    reason: str | None = None


class ChoiceText:
    """The text of one choice, and the log probabilities of the tokens that it gives."""

    def __init__(self, index: int, detokenizer: lz.IncrementalDetokenizer) -> None:
        self._index, self._detokenizer = index, detokenizer
        self._pending: list[TokenLog] = []
        self.drawn = 0

    def feed(self, drawn: Drawn) -> Piece | None:
        """What `drawn` completes, or None where it only ends the text."""
        self.drawn += 1
        if not drawn.is_text:
            return None
        if drawn.logprob is not None:
            self._pending.append(TokenLog(self._detokenizer.length, drawn))
        text = self._detokenizer.feed(drawn.token)
        return Piece(self._index, text, self._begun(), "stop" if self._detokenizer.stopped else None)

    def end(self, reason: str) -> Piece:
        """What was held back at the end."""
        text = self._detokenizer.end()
        return Piece(self._index, text, tuple(self._pending), reason)

    def _begun(self) -> tuple[TokenLog, ...]:
        """The tokens whose text has begun to be given."""
        released = self._detokenizer.released
        begun = [token for token in self._pending if token.offset < released]
        self._pending = self._pending[len(begun) :]
        return tuple(begun)


@dataclass(slots=True)
class Usage:
    """Tokens of a prompt, and tokens drawn over all choices."""

    prompt: int = 0
    drawn: int = 0

    def body(self) -> dict[str, Any]:
        """The counts in the words of the API."""
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.drawn,
            "total_tokens": self.prompt + self.drawn,
        }  # fmt: skip


class Format(Protocol):
    """How the answer of one endpoint is spelled; `head` is what each of its objects has."""

    head: dict[str, Any]

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream: the pieces of each choice."""
        ...

    def begin(self, index: int) -> dict[str, Any] | None:
        """The first event of a choice, if it has one."""
        ...

    def event(self, piece: Piece) -> dict[str, Any]:
        """The event of a piece."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The event of the counts."""
        ...


@dataclass
class _Head:
    model: str
    tokenizer: lz.Tokenizer
    with_usage: bool
    prefix: str
    whole_kind: str
    event_kind: str
    head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model,
        }  # fmt: skip

    def _whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self.head, "object": self.whole_kind, "choices": choices, "usage": usage.body()}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        counts = {"usage": None} if self.with_usage else {}
        return {**self.head, "object": self.event_kind, "choices": [choice], **counts}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self.head, "object": self.event_kind, "choices": [], "usage": usage.body()}


class CompletionFormat(_Head):
    """/v1/completions."""

    def __init__(self, model: str, tokenizer: lz.Tokenizer, with_usage: bool) -> None:
        super().__init__(model, tokenizer, with_usage, "cmpl", "text_completion", "text_completion")

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        return self._whole([self._choice(joined(pieces)) for pieces in choices], usage)

    def begin(self, index: int) -> None:
        return None

    def event(self, piece: Piece) -> dict[str, Any]:
        return self._event(self._choice(piece))

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece.tokens),
            "finish_reason": piece.reason,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[TokenLog]) -> dict[str, Any] | None:
        if not tokens:
            return None
        name = self.tokenizer.token_text
        return {
            "tokens": [name(token.drawn.token) for token in tokens],
            "token_logprobs": [token.drawn.logprob for token in tokens],
            "top_logprobs": [
                {name(other): logprob for other, logprob in reversed(token.drawn.likeliest)}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }


class ChatFormat(_Head):
    """/v1/chat/completions."""

    def __init__(self, model: str, tokenizer: lz.Tokenizer, with_usage: bool) -> None:
        super().__init__(model, tokenizer, with_usage, "chatcmpl", "chat.completion", "chat.completion.chunk")

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        return self._whole([self._message(joined(pieces)) for pieces in choices], usage)

    def begin(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def event(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._event({"index": piece.index, "delta": delta, **self._rest(piece)})

    def _message(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.index, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        content = [
            self._token(token.drawn.token, token.drawn.logprob)
            | {"top_logprobs": [self._token(*other) for other in token.drawn.likeliest]}
            for token in piece.tokens
        ]
        logprobs = {"content": content, "refusal": None} if content else None
        return {"logprobs": logprobs, "finish_reason": piece.reason}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece(pieces[-1].index, text, tokens, pieces[-1].reason)


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in the words of the API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
