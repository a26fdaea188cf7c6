"""Small tokenizers of each library, made of the repository's prose."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers
from tiktoken._educational import bpe_train

PROSE = Path(__file__).parents[2] / "examples" / "data" / "sentences.txt"
SENTENCES = [line for line in PROSE.read_text().splitlines() if line and not line.startswith("#")]
ODD = [
    "",
    " ",
    "naïve café",
    "e\u0301",
    "👩‍👩‍👧 zero\u200bwidth",
    "a\r\nb\tc",
    "ﬁ ligature",
    "<s> typed </s>",
    "中文 \ufffd <|end|>",
]
PATTERN = r"""'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"""
NUM_RANKS = 300
SPECIALS = {"<|end|>": NUM_RANKS, "<|user|>": NUM_RANKS + 4}  # between them stands nothing


def trained(size: int = 400, normalizer: str | None = "NFC", **changes: Any) -> Any:
    """A byte-level BPE of `tokenizers`, with a template of special tokens."""
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
    from tokenizers.decoders import ByteLevel

    made = tokenizers.Tokenizer(models.BPE(unk_token=None))
    if normalizer:
        made.normalizer = getattr(normalizers, normalizer)()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False, **changes
    )
    made.train_from_iterator(SENTENCES, trainer)
    pair = [(token, made.token_to_id(token)) for token in special]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=pair)
    return made


@cache
def ranks() -> dict[bytes, int]:
    """Bytes and merges, by the library's own trainer."""
    text = " ".join(SENTENCES[:60])
    return bpe_train(text, NUM_RANKS, PATTERN, visualise=None)


def encoding(**changes: Any) -> Any:
    """An encoding of tiktoken with two special tokens and a hole between them."""
    parts = {"name": "prose", "pat_str": PATTERN, "mergeable_ranks": ranks(), "special_tokens": SPECIALS}
    return tiktoken.Encoding(**parts | changes)


@cache
def model_proto(rule: str = "nmt_nfkc") -> bytes:
    """A unigram model of SentencePiece, with the bytes of characters that it does not know."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=made, vocab_size=500, byte_fallback=True,
        normalization_rule_name=rule, hard_vocab_limit=False, minloglevel=2, pad_id=3, num_threads=1,
    )  # fmt: skip
    return made.getvalue()


def processor(**options: Any) -> Any:
    """A processor of SentencePiece that puts <s> before a text."""
    return sentencepiece.SentencePieceProcessor(model_proto=model_proto(), **{"add_bos": True, **options})


def tekken(folder: Path) -> Path:
    """A tekken.json of mistral-common: the ranks behind a hundred special tokens."""
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for piece, rank in sorted(ranks().items(), key=lambda entry: entry[1])
    ]
    config = {
        "pattern": PATTERN, "num_vocab_tokens": NUM_RANKS, "default_vocab_size": NUM_RANKS + 100,
        "default_num_special_tokens": 100, "version": "v3",
    }  # fmt: skip
    file = folder / "tekken.json"
    file.write_text(json.dumps({"vocab": vocabulary, "config": config, "type": "Tekken", "version": 1}))
    return file
