"""`tokenize` and `detokenize`: texts of many callers meet in the CPU's batcher like the rows of an op."""

from __future__ import annotations

from torch import Tensor

from layerzero.calls.batched import batched
from layerzero.tokenization.tokenizer import Tokenizer, Tokens

# Texts below so many characters cost about the same.
_SHORT = 1024


async def tokenize(
    text: str,
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = True,
    offsets: bool = False,
    priority: int = 1,
    timeout: float | None = None,  # noqa: ASYNC109  the batcher cancels queued calls by it
) -> Tokens:
    """The tokens of one text; concurrent calls with the same tokenizer are encoded as one batch.

    Args: text; `special_tokens` adds what the tokenizer puts around a text; `offsets` gives the characters
        of each token; `priority` and `timeout` as for ops.
    Returns: Tokens: ids (T,) int64 on the CPU, and offsets (T, 2) or None.
    Raises: TypeError: text is no string, or tokenizer is no Tokenizer.
    """
    _need(tokenizer)
    if not isinstance(text, str):
        raise TypeError(f"text needs a str, got {type(text).__name__}")
    # A batcher learns what a call costs: texts of very different lengths are different functions to it.
    size = max(len(text), _SHORT).bit_length() // 2
    encode = batched(tokenizer.encode_rows, pure=True, device="cpu", key=f"encode_rows, {size}")
    tokens: Tokens = await encode(
        text, bool(special_tokens), bool(offsets), priority=priority, timeout=timeout
    )
    return tokens


async def detokenize(
    ids: Tensor,
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    priority: int = 1,
    timeout: float | None = None,  # noqa: ASYNC109  as above
) -> str:
    """The text of one row of ids (T,) on the CPU; concurrent calls with the same tokenizer share a batch.

    Raises: TypeError: ids is no vector of int32 or int64. ValueError: an id is not in the vocabulary.
    """
    _need(tokenizer)
    plain = tokenizer.ids_of(ids)
    decode = batched(tokenizer.decode_rows, pure=True, device="cpu")
    text: str = await decode(plain, bool(skip_special_tokens), priority=priority, timeout=timeout)
    return text


def _need(tokenizer: object) -> None:
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer needs a layerzero.Tokenizer, got {type(tokenizer).__name__}")
