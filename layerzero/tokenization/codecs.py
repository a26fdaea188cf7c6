"""The tokenizers of four libraries behind one set of calls."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import msgspec

from layerzero.tokenization.identity import NONE, Identity, digest, identify

Span = tuple[int, int]
Row = tuple[list[int], list[Span] | None]
# Characters of a batch from which the threads of tiktoken's pool cost less than they bring.
_MANY = 1 << 16
_INSIDE = bytes(range(0x80, 0xC0))  # what a byte inside a UTF-8 character is


class Codec:
    """One library's tokenizer; ids and spans are the library's own, for each text by itself.

    `size` is above every id, and those in `missing` stand for nothing; `special` are the texts of special
    tokens. `before` and `after` are put around a text with special tokens. Where `bytewise`, a text is its
    tokens' bytes behind each other.
    """

    identity: Identity
    size: int
    missing: frozenset[int] = frozenset()
    special: Mapping[int, str]
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    pad: int | None = None
    bytewise = True
    limit: int | None = None  # tokens that the tokenizer's own file allows, and the side that is cut
    limit_side = "right"

    def plain(self, texts: list[str], spans: bool) -> list[Row]:
        """Each text's ids, and the characters of each with `spans`; special tokens in a text are text."""
        raise NotImplementedError

    def decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        """The text of each row, without its special tokens with `skip`."""
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which may begin or end inside a character."""
        raise NotImplementedError

    def encode(self, texts: list[str], special: bool, marked: bool, spans: bool) -> list[Row]:
        """Each text's ids; `special` puts tokens around it, `marked` reads those inside it."""
        rows = [self._marked(text, spans) for text in texts] if marked else self.plain(texts, spans)
        if not special or not (self.before or self.after):
            return rows
        first, last = [(0, 0)] * len(self.before), [(0, 0)] * len(self.after)
        return [
            ([*self.before, *ids, *self.after], None if places is None else [*first, *places, *last])
            for ids, places in rows
        ]

    def _marked(self, text: str, spans: bool) -> Row:
        """A text's ids where special tokens inside it are read, and the rest between them is text."""
        ids: list[int] = []
        offsets: list[Span] = []
        start = 0
        for part in self._marks.split(text) if self.special else [text]:
            token = self._ids_of_marks.get(part)
            if token is not None:
                ids.append(token)
                offsets.append((start, start + len(part)))
            elif part:
                ((part_ids, places),) = self.plain([part], spans)
                ids += part_ids
                offsets += [(start + begin, start + end) for begin, end in places or ()]
            start += len(part)
        return ids, offsets if spans else None

    @cached_property
    def _ids_of_marks(self) -> dict[str, int]:
        return {text: token for token, text in self.special.items()}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        longest_first = sorted(self.special.values(), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


class HuggingFaceCodec(Codec):
    """A `tokenizers.Tokenizer` of our own, without padding and truncation.

    It reads the special tokens inside a text whatever `marked` says.
    """

    def __init__(self, tokenizer: Any) -> None:
        definition = json.loads(tokenizer.to_str())
        self._own = tokenizer
        cut, padding = tokenizer.truncation, tokenizer.padding
        if cut is not None:
            self.limit, self.limit_side = int(cut["max_length"]), str(cut["direction"])
        self.pad = padding and int(padding["pad_id"])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.identity = identify(definition)
        vocabulary = set(tokenizer.get_vocab(with_added_tokens=True).values())
        self.size = max(vocabulary, default=-1) + 1
        self.missing = frozenset(range(self.size)) - vocabulary
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token: one.content for token, one in added.items() if one.special}
        decoder = definition["decoder"] or {}
        self.bytewise = decoder.get("type") == "ByteLevel"
        self._bytes = _bytes_of_characters() if "ByteLevel" in json.dumps(decoder) else {}
        probe = tokenizer.encode("a")
        ids, mask = probe.ids, probe.special_tokens_mask
        first = mask.index(0) if 0 in mask else len(mask)
        last = mask[::-1].index(0) if 0 in mask else 0
        self.before, self.after = ids[:first], ids[len(ids) - last :]

    def encode(self, texts: list[str], special: bool, marked: bool, spans: bool) -> list[Row]:
        """As the library: `marked` or not."""
        run = self._own.encode_batch if spans else self._own.encode_batch_fast
        rows = run(texts, add_special_tokens=special)
        return [(row.ids, row.offsets if spans else None) for row in rows]

    def decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        """As the library."""
        return list(self._own.decode_batch(rows, skip_special_tokens=skip))

    def piece(self, token: int) -> bytes:
        """By GPT-2's table, by the name of a byte, or the token's text."""
        name: str = self._own.id_to_token(token) or ""
        if token not in self.special:
            if self._bytes and all(character in self._bytes for character in name):
                return bytes(self._bytes[character] for character in name)
            if (byte := _named_byte(name)) is not None:
                return byte
        return str(self._own.decode([token], skip_special_tokens=False)).encode()


class TiktokenCodec(Codec):
    """A `tiktoken.Encoding`, whose ids are `shift` higher here; `special` are the tokens of an owner."""

    def __init__(self, encoding: Any, shift: int = 0, special: Mapping[int, str] | None = None) -> None:
        self._own, self._shift = encoding, shift
        ranks: Mapping[bytes, int] = encoding._mergeable_ranks
        self.special = special or {token: text for text, token in encoding._special_tokens.items()}
        self.size = max(encoding.max_token_value + shift, *self.special, 0) + 1
        self.missing = frozenset(range(self.size)).difference(
            (rank + shift for rank in ranks.values()), self.special
        )
        vocabulary = digest({piece.hex(): rank for piece, rank in ranks.items()})
        names = digest({text: token for token, text in self.special.items()})
        self.identity = Identity(
            library="tiktoken",
            digest=digest([encoding._pat_str, vocabulary, names, shift]),
            vocabulary=vocabulary,
            merges=vocabulary,  # the order of the ranks
            special_tokens=names,
            normalizer=NONE,
            pretokenizer=f"Regex({digest(encoding._pat_str)[:12]})",
        )

    def plain(self, texts: list[str], spans: bool) -> list[Row]:
        """As `encode_ordinary`; spans begin where `decode_with_offsets` lets them."""
        library, shift = self._own, self._shift
        if len(texts) > 1 and sum(map(len, texts)) > _MANY:
            rows = library.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        else:
            rows = [library.encode_ordinary(text) for text in texts]
        places = [_spans(library.decode_tokens_bytes(ids)) if spans else None for ids in rows]
        if shift:
            rows = [[token + shift for token in ids] for ids in rows]
        return list(zip(rows, places, strict=True))

    def decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        """The tokens' bytes behind each other; halves of characters become replacement characters."""
        return [self._text(row, skip).decode(errors="replace") for row in rows]

    def _text(self, row: list[int], skip: bool) -> bytes:
        special, shift = self.special, self._shift
        if skip:
            row = [token for token in row if token not in special]
        elif not special.keys().isdisjoint(row):
            return b"".join(map(self.piece, row))
        data: bytes = self._own.decode_bytes([token - shift for token in row] if shift else row)
        return data

    def piece(self, token: int) -> bytes:
        """The rank's bytes, or the special token's text."""
        text = self.special.get(token)
        if text is not None:
            return text.encode()
        data: bytes = self._own.decode_single_token_bytes(token - self._shift)
        return data


class SentencePieceCodec(Codec):
    """A `SentencePieceProcessor` of our own, out of another's model and what it puts around a text."""

    bytewise = False  # a space at the beginning belongs to no text

    def __init__(self, source: Any, library: Any, bos: bool, eos: bool) -> None:
        proto = source.serialized_model_proto()
        processor = self._own = library.SentencePieceProcessor(model_proto=proto)
        self.before = [processor.bos_id()] if bos else []
        self.after = [processor.eos_id()] if eos else []
        self.pad = processor.pad_id() if processor.pad_id() >= 0 else None
        self.size = processor.get_piece_size()
        self._pieces = [processor.id_to_piece(token) for token in range(self.size)]
        self.special = {token: text for token, text in enumerate(self._pieces) if processor.is_control(token)}
        # A message begins with its first field, and the first of a normalizer's is its name.
        spec = library.SentencePieceNormalizer(model_proto=proto).serialized_normalizer_spec()
        name = spec[2 : 2 + spec[1]].decode() if spec[:1] == b"\n" else ""
        self.identity = Identity(
            library="sentencepiece",
            digest=digest([proto.hex(), self.before, self.after]),
            vocabulary=digest(
                [[text, processor.get_score(token)] for token, text in enumerate(self._pieces)]
            ),
            merges=digest(None),
            special_tokens=digest([*self.special.items()]),
            normalizer=name or NONE,
            pretokenizer=NONE,
        )

    def plain(self, texts: list[str], spans: bool) -> list[Row]:
        """As `encode`, and as its mapping of offsets."""
        if not spans:
            return [(ids, None) for ids in self._own.encode(texts)]
        rows = self._own.encode(texts, return_type="offset_mapping")
        return [(row["ids"], row["offsets"]) for row in rows]

    def decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        """As `decode`, which knows no special tokens; unless `skip` their names are between the texts."""
        if skip or all(self.special.keys().isdisjoint(row) for row in rows):
            return [str(text) for text in self._own.decode(rows)] if rows else []
        return ["".join(map(self._run, *_runs(row, self.special))) for row in rows]

    def _run(self, special: bool, row: list[int]) -> str:
        return "".join(self.special[token] for token in row) if special else str(self._own.decode(row))

    def piece(self, token: int) -> bytes:
        """The piece's text with spaces, or the byte that it names."""
        name = self._pieces[token]
        byte = _named_byte(name) if self._own.is_byte(token) else None
        return name.replace("\u2581", " ").encode() if byte is None else byte


def mistral(source: Any, library: Callable[[str], Any]) -> Codec:
    """The codec of a tokenizer of mistral-common: tiktoken's or SentencePiece's, with Mistral's specials.

    A text begins with <s>, and special tokens inside it are text.
    """
    tokenizer = getattr(getattr(source, "instruct_tokenizer", source), "tokenizer", source)
    if hasattr(tokenizer._model, "serialized_model_proto"):
        codec: Codec = SentencePieceCodec(tokenizer._model, library("sentencepiece"), True, False)
    else:
        special = {token: tokenizer.id_to_piece(token) for token in range(tokenizer.num_special_tokens)}
        codec = TiktokenCodec(tokenizer._model, tokenizer.num_special_tokens, special)
        codec.before = [tokenizer.bos_id]
        codec.pad = tokenizer.pad_id
    version = digest([codec.identity.digest, str(tokenizer.version.value)])
    codec.identity = msgspec.structs.replace(codec.identity, library="mistral-common", digest=version)
    return codec


def _runs(row: list[int], special: Mapping[int, str]) -> tuple[list[bool], list[list[int]]]:
    runs = [(is_special, list(run)) for is_special, run in groupby(row, special.__contains__)]
    return [is_special for is_special, _ in runs], [run for _, run in runs]


def _spans(pieces: Iterable[bytes]) -> list[Span]:
    """The characters that each piece has bytes of, from the first to behind the last."""
    spans, begun = [], 0
    for piece in pieces:
        start = begun - 1 if is_inside(piece) and begun else begun
        begun += len(piece.translate(None, _INSIDE))
        spans.append((start, begun))
    return spans


def is_inside(piece: bytes) -> bool:
    """Whether bytes of UTF-8 begin inside a character."""
    return piece[:1] in _FIRST_INSIDE


_FIRST_INSIDE = frozenset(bytes([byte]) for byte in _INSIDE)


def _named_byte(name: str) -> bytes | None:
    """The byte that a token like <0xE4> stands for."""
    return bytes([int(name[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", name) else None


def _bytes_of_characters() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
