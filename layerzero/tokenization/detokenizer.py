"""Tokens into text, piece by piece, as they are drawn."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from layerzero.tokenization.tokenizer import Tokenizer

_HALF = "\ufffd"
# Tokens that may wait for the rest of a character: of a tokenizer whose text is not its tokens' bytes, each
# that holds a part of one holds a byte, and a character has four.
_MOST_WAITING = 4


class IncrementalDetokenizer:
    """Tokens into text, piece by piece: whole characters only, nothing of a stop string.

    All pieces behind each other are the text of all tokens without special ones, up to the first of `stop`.
    Where a token's text depends on those before it, each is decoded behind the last few that are known;
    otherwise only its bytes are read.
    Raises: TypeError: tokenizer is no Tokenizer. ValueError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(f"tokenizer needs a layerzero.Tokenizer, got {type(tokenizer).__name__}")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop needs a sequence of texts that are not empty, got {stop!r:.80}")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.codec.bytewise else None
        # The last ids: the first `_known` of them are in the text already and are context.
        self._ids: list[int] = []
        self._known = 0
        self._text = ""
        self.released = 0  # characters that were given
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters that are known, given or held back."""
        return len(self._text)

    def feed(self, token: int) -> str:
        """The text that `token` completes; may be empty, and is after a stop string.

        An id that stands for nothing, as of a row that only fills a model's vocabulary, has no text.
        """
        if self.stopped:
            return ""
        self._text += self._completed(token)
        return self._release(self._num_held_back())

    def end(self) -> str:
        """What was held back at the end of the text."""
        if self.stopped:
            return ""
        self._text += self._utf8.decode(b"", final=True) if self._utf8 is not None else self._decoded()
        return self._release(0)

    def _completed(self, token: int) -> str:
        """The text that is whole with `token`; a character that is only half there waits."""
        codec = self._tokenizer.codec
        if token in codec.special or not self._tokenizer.knows(token):
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(codec.piece(token))
        self._ids.append(token)
        text = self._decoded()
        if text.endswith(_HALF) and len(self._ids) - self._known < _MOST_WAITING:
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text

    def _decoded(self) -> str:
        """The text of the ids that are not in it yet."""
        before, after = self._tokenizer.codec.decode([self._ids[: self._known], self._ids], True)
        return after[len(before) :]

    def _release(self, num_held_back: int) -> str:
        """Give what no stop string begins in; so many characters at the end wait for what follows.

        Of several the one that is complete first counts, as if characters came one by one.
        """
        begins = [(self._text.find(stop, self.released), stop) for stop in self._stop]
        ends = [(begin + len(stop), begin) for begin, stop in begins if begin >= 0]
        self.stopped = bool(ends)
        upto = min(ends)[1] if ends else len(self._text) - num_held_back
        piece = self._text[self.released : upto]
        self.released = max(self.released, upto)
        return piece

    def _num_held_back(self) -> int:
        """How many characters at the end may begin a stop string; one that does not is looked at once."""
        for begin in range(self.released, len(self._text) if self._stop else 0):
            tail = self._text[begin:]
            if any(stop.startswith(tail) for stop in self._stop):
                return len(tail)
        return 0
