"""A tokenizer of the `tokenizers` library, its identity, and batches that know nothing of each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.reasons import Reason

_MAX_FILE = 256 << 20


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer is, as SHA-256 digests of its parts; two with one `digest` give the same tokens.

    `normalizer` and `pretokenizer` are the names of what they do, "none" where nothing is done.
    """

    digest: str
    vocabulary: str
    merges: str
    special_tokens: str
    normalizer: str
    pretokenizer: str


class Tokens(msgspec.Struct, frozen=True):
    """One text as ids (T,) int64; with `offsets` (T, 2) int64, the characters each token stands for."""

    ids: Tensor
    offsets: Tensor | None = None


class Tokenizer:
    """A tokenizer that gives every text the same tokens alone and in any batch.

    `source` is a `tokenizer.json` (a path) or a `tokenizers.Tokenizer`, which is copied: later changes of
    it are another tokenizer. Padding is switched off in the copy, since it would make a text's tokens
    depend on its neighbours.

    Raises: BackendNotAvailableError: `tokenizers` is not installed. ConfigurationError: the file cannot be
        read as a tokenizer. TypeError: `source` is neither.
    """

    def __init__(self, source: str | Path | Any) -> None:
        library = _library()
        text = _definition(source, library)
        try:
            self._own = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise ConfigurationError(f"source needs a tokenizer's JSON: {error}") from error
        self._own.no_padding()
        self.identity = identify(json.loads(self._own.to_str()))
        self.vocabulary = int(self._own.get_vocab_size(with_added_tokens=True))

    def encode(
        self, texts: Sequence[str], *, special_tokens: bool = True, offsets: bool = False
    ) -> list[Tokens]:
        """The tokens of each text, blocking.

        Raises: TypeError: a text is no string, by position.
        """
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{index}] needs a str, got {type(text).__name__}")
        run = self._own.encode_batch if offsets else self._own.encode_batch_fast
        encodings = run(list(texts), add_special_tokens=special_tokens)
        return [
            Tokens(
                torch.tensor(one.ids, dtype=torch.int64),
                torch.tensor(one.offsets, dtype=torch.int64).view(-1, 2) if offsets else None,
            )
            for one in encodings
        ]

    def decode(self, rows: Sequence[Tensor], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each row of ids, blocking.

        Raises: TypeError, ValueError: a row is no vector of ids, or an id is not in the vocabulary.
        """
        plain = [self.ids_of(row, f"rows[{index}]") for index, row in enumerate(rows)]
        return self._decode(plain, skip_special_tokens)

    def _decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        return [str(text) for text in self._own.decode_batch(rows, skip_special_tokens=skip)]

    def ids_of(self, row: Any, name: str = "ids") -> list[int]:
        """A vector of ids as a list, each in the vocabulary.

        Raises: TypeError, ValueError: it is no such vector; `name` is in the message.
        """
        if not isinstance(row, Tensor) or row.dtype not in (torch.int32, torch.int64) or row.dim() != 1:
            got = f"{row.dtype} {tuple(row.shape)}" if isinstance(row, Tensor) else type(row).__name__
            raise TypeError(f"{name} needs a vector of int32 or int64, got {got}")
        if row.device.type != "cpu":
            raise ValueError(f"{name} needs to be on the CPU, got {row.device}; await layerzero.to_host(ids)")
        ids: list[int] = row.tolist()
        for place, number in enumerate(ids):
            if not 0 <= number < self.vocabulary:
                raise ValueError(
                    f"{name} needs ids in [0, {self.vocabulary}), got {number} at position {place}"
                )
        return ids

    # -- what a batcher runs: one result a caller, whatever their flags ----------------------------------

    def encode_rows(self, texts: list[str], special: list[bool], offsets: list[bool]) -> list[Tokens]:
        """The tokens of every caller's text: one call of the library for each pair of flags."""
        results: list[Any] = [None] * len(texts)
        for flags in dict.fromkeys(zip(special, offsets, strict=True)):
            where = [
                i for i, row_flags in enumerate(zip(special, offsets, strict=True)) if row_flags == flags
            ]
            encodings = self.encode([texts[i] for i in where], special_tokens=flags[0], offsets=flags[1])
            for i, tokens in zip(where, encodings, strict=True):
                results[i] = tokens
        return results

    def decode_rows(self, rows: list[list[int]], skip: list[bool]) -> list[str]:
        """The text of every caller's ids."""
        results = [""] * len(rows)
        for flag in dict.fromkeys(skip):
            where = [i for i, row_flag in enumerate(skip) if row_flag == flag]
            texts = self._decode([rows[i] for i in where], flag)
            for i, text in zip(where, texts, strict=True):
                results[i] = text
        return results

    def __repr__(self) -> str:
        return f"<Tokenizer {self.identity.digest[:12]}, {self.vocabulary} tokens>"


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise BackendNotAvailableError(
            "tokenize needs the tokenizers library: pip install 'layerzero-runtime[tokenizers]'",
            backend="tokenizers",
            reason=Reason.BACKEND_MISSING,
        ) from error
    return tokenizers


def _definition(source: Any, library: Any) -> str:
    """The JSON that defines a tokenizer."""
    if isinstance(source, library.Tokenizer):
        return str(source.to_str())
    if not isinstance(source, str | Path):
        raise TypeError(
            f"source needs a path to a tokenizer.json or a tokenizers.Tokenizer, got {type(source).__name__}"
        )
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ConfigurationError(f"source needs a file of at most {_MAX_FILE >> 20} MiB, got {path}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"source needs a readable tokenizer.json, got {path}: {error}") from error


def identify(definition: Mapping[str, Any]) -> Identity:
    """The digests of a tokenizer's JSON: the same on every machine and in every process."""
    model = definition.get("model") or {}
    # Truncation changes what comes out, padding is never used here.
    whole = {name: part for name, part in definition.items() if name != "padding"}
    return Identity(
        digest=_digest(whole),
        vocabulary=_digest(model.get("vocab")),
        merges=_digest(model.get("merges")),
        special_tokens=_digest(definition.get("added_tokens")),
        normalizer=_kind(definition.get("normalizer")),
        pretokenizer=_kind(definition.get("pre_tokenizer")),
    )


def _digest(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(part: Any) -> str:
    """The types of a step and of what it is made of, in order."""
    if not part:
        return "none"
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    return f"{part['type']}({', '.join(map(_kind, inner))})" if inner else str(part["type"])
