"""What a tokenizer is, as digests that are the same on every machine and in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

NONE = "none"
_HEX = frozenset("0123456789abcdef")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a tokenizer is, as SHA-256 digests of its parts; two with one `digest` give the same tokens.

    `library` made it; `normalizer` and `pretokenizer` are the names of what they do, "none" where nothing is
    done.
    Raises: ValueError: `digest` or `vocabulary` is no SHA-256 digest; TypeError: it is not given.
    """

    library: str
    digest: str
    vocabulary: str
    merges: str
    special_tokens: str
    normalizer: str
    pretokenizer: str

    def __post_init__(self) -> None:
        for name in ("digest", "vocabulary"):
            value = getattr(self, name)
            if len(value) != 64 or not _HEX.issuperset(value):
                raise ValueError(f"{name} needs a SHA-256 digest in hexadecimal digits, got {value!r:.80}")


def identify(definition: Mapping[str, Any]) -> Identity:
    """The digests of a Hugging Face tokenizer's JSON."""
    model = definition.get("model") or {}
    # Truncation changes what comes out, padding is never used here.
    whole = {name: part for name, part in definition.items() if name != "padding"}
    return Identity(
        library="tokenizers",
        digest=digest(whole),
        vocabulary=digest(model.get("vocab")),
        merges=digest(model.get("merges")),
        special_tokens=digest(definition.get("added_tokens")),
        normalizer=_kind(definition.get("normalizer")),
        pretokenizer=_kind(definition.get("pre_tokenizer")),
    )


def digest(part: Any) -> str:
    """The SHA-256 digest of a JSON-ready value."""
    text = json.dumps(part, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _kind(part: Any) -> str:
    """The types of a step and of what it is made of, in order."""
    if not part:
        return NONE
    inner = part.get("normalizers") or part.get("pretokenizers") or ()
    return f"{part['type']}({', '.join(map(_kind, inner))})" if inner else str(part["type"])
