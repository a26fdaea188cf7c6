"""Tokens into text, piece by piece, and messages into a prompt."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_HALF = "\ufffd"


class IncrementalDetokenizer:
    """Tokens into text, piece by piece: whole characters only, nothing of a stop string.

    A token's text depends on the ones before it, so each is decoded behind the last few that are known.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # Ids from the first offset on are decoded; those before the second are in the text.
        self._prefix_offset = self._read_offset = 0
        self._text = ""
        self.released = 0  # characters that were given
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters that are known, given or held back."""
        return len(self._text)

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
        """Give what no stop string begins in; so many characters at the end wait for what follows."""
        ends = [end for end in (self._text.find(stop, self.released) for stop in self._stop) if end >= 0]
        self.stopped = bool(ends)
        upto = min(ends) if ends else len(self._text) - num_held_back
        piece = self._text[self.released : upto]
        self.released = max(self.released, upto)
        return piece

    def _num_held_back(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = 0
        for stop in self._stop:
            sizes = range(min(len(stop) - 1, len(self._text)), longest, -1)
            longest = next((size for size in sizes if self._text.endswith(stop[:size])), longest)
        return longest


def _bytes_of_characters() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class TokenTexts:
    """The text and the bytes of single tokens, as an answer with log probabilities names them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        self._is_byte_level = "ByteLevel" in json.dumps(decoder)
        self._special = {
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self._bytes = _bytes_of_characters()

    def text(self, token: int) -> str:
        """The token by itself; half a character is a replacement character."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def bytes(self, token: int) -> list[int]:
        """The token's bytes, also those of half a character."""
        name: str = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level and token not in self._special and all(char in self._bytes for char in name):
            return [self._bytes[char] for char in name]
        if len(name) == 6 and name.startswith("<0x"):
            return [int(name[3:5], 16)]
        return list(self.text(token).encode())


class TemplateRefused(Exception):
    """The template has no prompt for these messages, and says why."""


class ChatTemplate:
    """A tokenizer's template from messages to a prompt, run where it can reach nothing else."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template, self._special = environment.from_string(source), special

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, up to where the answer begins.

        Raises: TemplateRefused: the messages do not fit the template.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise TemplateRefused(str(error)) from error


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as transformers' templates expect it: without HTML's escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder, or None where it has none."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    source = config.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    special = {
        name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token") if name in config
    }
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in special.items()}
    return ChatTemplate(source, {name: value for name, value in texts.items() if value is not None})
