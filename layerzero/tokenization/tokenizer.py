"""`Tokenizer`: a tokenizer of any of four libraries, its identity, its batches and its padding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerzero.spec.errors import ChatTemplateError, TokenizerMismatchError
from layerzero.spec.reasons import Reason, Rejected
from layerzero.tokenization.codecs import Row, is_inside
from layerzero.tokenization.identity import Identity
from layerzero.tokenization.prompts import PromptCache
from layerzero.tokenization.sources import find_file, open_file, open_object
from layerzero.tokenization.templates import ChatTemplate, Message, MistralTemplate
from layerzero.tokenization.tokens import EncodeOptions, Padded, Tokens, tensor_of, tensor_of_spans

SIDES = ("right", "left")
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A tokenizer that gives every text the same tokens alone and in any batch.

    `source` is a file or a folder (tokenizer.json of Hugging Face, tekken.json or tokenizer.model.v3 of
    Mistral, tokenizer.model of SentencePiece), or an object of `tokenizers`, `transformers`, `tiktoken`,
    `sentencepiece` or `mistral_common`, which is copied as far as it can change. A padding of the source is
    switched off, since it would make a text's tokens depend on its neighbours; a truncation becomes
    `max_tokens`, which never splits a character.

    Args: cache: prompts that were tokenized before are found there. namespace: whose they are, by default
        the file's path. chat_template: by default the one that lies beside the file.
    Raises: BackendNotAvailableError: the library is not installed. ConfigurationError: the file cannot be
        read as a tokenizer. TokenizerMismatchError: the cache knows another tokenizer under this namespace.
        TypeError: `source` is neither a path nor of one of these libraries.
    """

    def __init__(
        self,
        source: str | Path | Any,
        *,
        namespace: str | None = None,
        cache: PromptCache | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        path = find_file(Path(source)) if isinstance(source, str | Path) else None
        self.codec, template = open_object(source) if path is None else open_file(path)
        self.template = template if chat_template is None else chat_template
        self.identity: Identity = self.codec.identity
        self.vocabulary = self.codec.size
        self.max_tokens, self.truncation_side = self.codec.limit, self.codec.limit_side
        self.namespace = namespace if namespace is not None else str(path.resolve()) if path else ""
        self.cache = cache
        self.awaited: dict[str, Any] = {}  # its functions as awaitables, by what their calls cost
        if cache is not None and self.namespace:
            cache.admit(self.namespace, self.identity.digest)

    # -- texts to ids --------------------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str],
        *,
        special_tokens: bool = True,
        offsets: bool = False,
        max_tokens: int | None = None,
        truncation_side: str | None = None,
        parse_special: bool = False,
    ) -> list[Tokens]:
        """The tokens of each text, blocking and without the cache; the arguments as of `layerzero.tokenize`.

        Raises: TypeError: a text is no string, by position. ValueError: an argument is out of range, or a
            text holds half a surrogate pair.
        """
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"texts[{index}] needs a str, got {type(text).__name__}")
        options = self.encode_options(special_tokens, offsets, max_tokens, truncation_side, parse_special)
        return self._encode(list(texts), options)

    def encode_options(
        self,
        special_tokens: bool = True,
        offsets: bool = False,
        max_tokens: int | None = None,
        truncation_side: str | None = None,
        parse_special: bool = False,
    ) -> EncodeOptions:
        """How texts are to be encoded, with what this tokenizer brings itself.

        Raises: ValueError: max_tokens leaves no room beside the special tokens; an unknown side. TypeError:
            max_tokens is no int.
        """
        limit = self.max_tokens if max_tokens is None else max_tokens
        side = self.truncation_side if truncation_side is None else truncation_side
        if side not in SIDES:
            raise ValueError(f"truncation_side needs one of {', '.join(SIDES)}, got {side!r}")
        if limit is not None:
            if not isinstance(limit, int):
                raise TypeError(f"max_tokens needs an int or None, got {type(limit).__name__}")
            num_around = len(self.codec.before) + len(self.codec.after)
            minimum = max(1, num_around if special_tokens else 0)
            if limit < minimum:
                raise ValueError(f"max_tokens needs at least {minimum}, got {limit}")
        return EncodeOptions(bool(special_tokens), bool(offsets), limit, side, bool(parse_special))

    def _encode(self, texts: list[str], options: EncodeOptions) -> list[Tokens]:
        try:
            rows = self.codec.encode(texts, options.special_tokens, options.parse_special, options.offsets)
        except (TypeError, UnicodeEncodeError) as error:  # whichever the library has for it
            bad = next((text for text in texts if _HALF_A_PAIR.search(text)), None)
            if bad is None:
                raise
            raise ValueError(f"text needs characters that UTF-8 has, got {bad!r:.80}") from error
        limit = options.max_tokens
        if limit is not None:
            rows = [self._cut(row, limit, options) if len(row[0]) > limit else row for row in rows]
        return [
            Tokens(tensor_of(ids), None if spans is None else tensor_of_spans(spans)) for ids, spans in rows
        ]

    def _cut(self, row: Row, limit: int, options: EncodeOptions) -> Row:
        """A row of at most `limit` tokens: what is around the text stays, no character is split."""
        ids, spans = row
        codec = self.codec
        before, after = (len(codec.before), len(codec.after)) if options.special_tokens else (0, 0)
        room = limit - before - after
        if options.truncation_side == "right":
            start, end = before, before + room
            while end > start and is_inside(codec.piece(ids[end])):
                end -= 1
        else:
            end = len(ids) - after
            start = end - room
            while start < end and is_inside(codec.piece(ids[start])):
                start += 1
        keep = [*range(before), *range(start, end), *range(len(ids) - after, len(ids))]
        return [ids[index] for index in keep], None if spans is None else [spans[index] for index in keep]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> Tokens:
        """The tokens of messages as the model was trained to read them, blocking.

        Raises: ChatTemplateError: there is no chat template, or the messages do not fit it.
        """
        if isinstance(self.template, MistralTemplate):
            return self.encode_mistral(messages, tools, add_generation_prompt, values)
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **values)
        return self.encode([text], special_tokens=False, parse_special=True)[0]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **values: Any,
    ) -> str:
        """The text of messages by the chat template, with the special tokens that it writes itself.

        Raises: ChatTemplateError: there is no chat template that writes text, or the messages do not fit it.
        """
        if not isinstance(self.template, ChatTemplate):
            kind = "none" if self.template is None else "mistral-common's, which makes tokens"
            raise ChatTemplateError(f"messages needs a tokenizer with a chat template, got {kind}")
        return self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **values
        )

    def encode_mistral(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        values: dict[str, Any],
    ) -> Tokens:
        """The tokens of messages by mistral-common, which knows no other values."""
        assert isinstance(self.template, MistralTemplate)
        if values or not add_generation_prompt:
            unknown = ", ".join([*values, *["add_generation_prompt=False"] * (not add_generation_prompt)])
            raise ChatTemplateError(f"mistral-common's chats take messages and tools, got {unknown}")
        return Tokens(tensor_of(self.template.ids(messages, tools)))

    def pad(
        self,
        rows: Sequence[Tokens | Tensor],
        *,
        length: int | None = None,
        multiple_of: int = 1,
        side: str = "right",
        pad_id: int | None = None,
    ) -> Padded:
        """Rows of ids side by side, as long as the longest or `length`, rounded up to `multiple_of`.

        Raises: ValueError: no rows, a row longer than `length`, no `pad_id` where the tokenizer has none.
        """
        ids = [row.ids if isinstance(row, Tokens) else row for row in rows]
        filler = self.codec.pad if pad_id is None else pad_id
        if side not in SIDES:
            raise ValueError(f"side needs one of {', '.join(SIDES)}, got {side!r}")
        if filler is None:
            raise ValueError("pad_id needs an id, since this tokenizer has no padding token, got None")
        if not ids or multiple_of < 1:
            raise ValueError(
                f"rows needs at least one row and multiple_of at least 1, got {len(ids)} and {multiple_of}"
            )
        longest = max(len(row) for row in ids)
        width = -(-(longest if length is None else length) // multiple_of) * multiple_of
        if longest > width:
            raise ValueError(f"length needs at least the longest row's {longest} tokens, got {length}")
        # A row of nothing but padding, so that all become as long as it.
        padded = pad_sequence(
            [*ids, ids[0].new_zeros(width)], batch_first=True, padding_value=filler, padding_side=side
        )[:-1]
        places = torch.arange(width, device=padded.device)
        lengths = torch.tensor([len(row) for row in ids], device=padded.device)[:, None]
        return Padded(padded, (places if side == "right" else places.flip(0)) < lengths)

    # -- ids to texts --------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Tensor], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each row of ids, blocking.

        Raises: TypeError, ValueError: a row is no vector of ids, or an id is not in the vocabulary.
        """
        plain = [self.ids_of(row, f"rows[{index}]") for index, row in enumerate(rows)]
        return self.codec.decode(plain, skip_special_tokens)

    @property
    def ids(self) -> Iterator[int]:
        """Every id that stands for a token, ascending."""
        return filter(self.knows, range(self.vocabulary))

    def token_text(self, token: int) -> str:
        """The token by itself, also a special one; half a character is a replacement character.

        An id that stands for nothing, as of a row that only fills a model's vocabulary, has no text.
        """
        return self.codec.decode([[token]], False)[0] if self.knows(token) else ""

    def token_bytes(self, token: int) -> bytes:
        """The token's bytes, also those of half a character; none of an id that stands for nothing."""
        return self.codec.piece(token) if self.knows(token) else b""

    def knows(self, token: int) -> bool:
        """Whether an id stands for a token."""
        return 0 <= token < self.vocabulary and token not in self.codec.missing

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
        size, missing = self.vocabulary, self.codec.missing
        for place, number in enumerate(ids):
            if not 0 <= number < size:
                raise ValueError(f"{name} needs ids in [0, {size}), got {number} at position {place}")
            if number in missing:
                raise ValueError(f"{name} needs ids of tokens, got {number} at position {place}")
        return ids

    # -- whose it is ---------------------------------------------------------------------------------------

    def require(self, *, digest: str | None = None, vocabulary: int | None = None) -> None:
        """Check that this is the tokenizer that another side means: by digest, or by a model's vocabulary.

        Raises: TokenizerMismatchError: it is another one, or gives ids that the model has no row for;
            `problem` has the reason code.
        """
        problem = None
        if digest is not None and digest != self.identity.digest:
            problem = Rejected(Reason.TOKENIZER_MISMATCH, "tokenizer", digest, self.identity.digest)
        elif vocabulary is not None and vocabulary < self.vocabulary:
            problem = Rejected(
                Reason.TOKENIZER_VOCABULARY, "tokenizer", f"ids below {vocabulary}", f"{self.vocabulary} ids"
            )
        if problem is not None:
            raise TokenizerMismatchError(str(problem), problem=problem)

    # -- what a batcher runs: one result a caller, whatever its options ----------------------------------

    def encode_rows(self, texts: list[str], options: list[EncodeOptions]) -> list[Tokens]:
        """The tokens of every caller's text: one call of the library for those that ask alike."""
        results: dict[int, Tokens] = {}
        for one in dict.fromkeys(options):
            where = [index for index, other in enumerate(options) if other == one]
            rows = self._encode([texts[index] for index in where], one)
            results |= zip(where, rows, strict=True)
        return [results[index] for index in range(len(texts))]

    def decode_rows(self, rows: list[list[int]], skip: list[bool]) -> list[str]:
        """The text of every caller's ids."""
        results = [""] * len(rows)
        for flag in dict.fromkeys(skip):
            where = [i for i, row_flag in enumerate(skip) if row_flag == flag]
            for i, text in zip(where, self.codec.decode([rows[i] for i in where], flag), strict=True):
                results[i] = text
        return results

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: a cache stays in its own."""
        return {**self.__dict__, "cache": None, "awaited": {}}

    def __repr__(self) -> str:
        return f"<Tokenizer {self.identity.library} {self.identity.digest[:12]}, {self.vocabulary} tokens>"
