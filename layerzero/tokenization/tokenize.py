"""`tokenize` and `detokenize`: texts of many callers meet in the CPU's batcher like the rows of an op."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from torch import Tensor

from layerzero.calls.batched import Batched, batched
from layerzero.spec.errors import DeadlineExceededError
from layerzero.tokenization.prompts import prompt_key
from layerzero.tokenization.templates import Message, MistralTemplate
from layerzero.tokenization.tokenizer import Tokenizer
from layerzero.tokenization.tokens import EncodeOptions, Tokens

T = TypeVar("T")
# Texts below so many characters cost about the same.
_SHORT = 1024
# From so many characters or tokens on a text fills a thread by itself, and would hold up the ops of the CPU
# behind it in the batcher. The libraries work without the interpreter's lock.
LONG = 1 << 14
_ENCODE = tuple(f"encode_rows, {size}" for size in range(LONG.bit_length() // 2 + 1))
_THREADS: RunVar[anyio.CapacityLimiter] = RunVar("layerzero_tokenizing_threads")


async def tokenize(
    text: str,
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = True,
    offsets: bool = False,
    max_tokens: int | None = None,
    truncation_side: str | None = None,
    parse_special: bool = False,
    priority: int = 1,
    timeout: float | None = None,  # noqa: ASYNC109  the batcher cancels queued calls by it
) -> Tokens:
    """The tokens of one text; concurrent calls with the same tokenizer are encoded as one batch.

    A text that the tokenizer's cache knows is answered from there. One of 16,384 characters or more is
    encoded on a thread of its own beside the batches; as many run at a time as there are CPUs.

    Args: text; `special_tokens` adds what the tokenizer puts around a text; `offsets` gives the characters
        of each token; `max_tokens` cuts the text, at the end or with `truncation_side="left"` at the
        beginning, so that no character is split and what is around it stays; `parse_special` reads
        special tokens inside the text (Hugging Face's tokenizers always do); `priority` and `timeout`
        as for ops, where a long text's timeout covers its encoding, too.
    Returns: Tokens: ids (T,) int64 on the CPU, and offsets (T, 2) or None.
    Raises: TypeError: text is no string, or tokenizer is no Tokenizer. ValueError: an argument is out of
        range, or the text holds half a surrogate pair. DeadlineExceededError: `timeout` has passed.
    """
    _need(tokenizer)
    if not isinstance(text, str):
        raise TypeError(f"text needs a str, got {type(text).__name__}")
    options = tokenizer.encode_options(special_tokens, offsets, max_tokens, truncation_side, parse_special)
    cache, key = tokenizer.cache, None
    if cache is not None:
        key = prompt_key(tokenizer.namespace, tokenizer.identity.digest, text, options)
        cached = cache.find(key)
        if cached is not None:
            return cached
    tokens = await _encoded(text, tokenizer, options, priority, timeout)
    if cache is not None:
        cache.keep(key, tokens)
    return tokens


def _encoded(
    text: str, tokenizer: Tokenizer, options: EncodeOptions, priority: int, timeout_s: float | None
) -> Awaitable[Tokens]:
    if len(text) >= LONG:
        return _encoded_beside(text, tokenizer, options, timeout_s)
    # A batcher learns what a call costs: texts of very different lengths are different functions to it.
    size = max(len(text), _SHORT).bit_length() // 2
    encode = _awaited(tokenizer, tokenizer.encode_rows, _ENCODE[size])
    return encode(text, options, priority=priority, timeout=timeout_s)


async def _encoded_beside(
    text: str, tokenizer: Tokenizer, options: EncodeOptions, timeout_s: float | None
) -> Tokens:
    return (await _beside(lambda: tokenizer.encode_rows([text], [options]), timeout_s))[0]


def _awaited(tokenizer: Tokenizer, run: Callable[..., list[T]], key: str) -> Batched[T]:
    """The awaitable of a method of the tokenizer, wrapped once."""
    awaitable: Batched[T] | None = tokenizer.awaited.get(key)
    if awaitable is None:
        awaitable = tokenizer.awaited[key] = batched(run, pure=True, device="cpu", key=key)
    return awaitable


async def tokenize_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    template_values: dict[str, Any] | None = None,
    priority: int = 1,
    timeout: float | None = None,  # noqa: ASYNC109  as above
) -> Tokens:
    """The tokens of messages as the model was trained to read them, by the tokenizer's chat template.

    Args: messages with `role` and `content`; `tools` and `template_values` as the template knows them;
        `add_generation_prompt` ends the prompt where the answer begins.
    Returns: Tokens: ids (T,) int64 on the CPU.
    Raises: ChatTemplateError: there is no chat template, or the messages do not fit it. Else as `tokenize`.
    """
    _need(tokenizer)
    values = template_values or {}
    if isinstance(tokenizer.template, MistralTemplate):
        return await _beside(
            lambda: tokenizer.encode_mistral(messages, tools, add_generation_prompt, values), timeout
        )
    text = tokenizer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **values)
    return await tokenize(
        text, tokenizer, special_tokens=False, parse_special=True, priority=priority, timeout=timeout
    )


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
        DeadlineExceededError: `timeout` has passed.
    """
    _need(tokenizer)
    plain, skip = tokenizer.ids_of(ids), bool(skip_special_tokens)
    if len(plain) >= LONG:
        return (await _beside(lambda: tokenizer.decode_rows([plain], [skip]), timeout))[0]
    decode = _awaited(tokenizer, tokenizer.decode_rows, "decode_rows")
    text: str = await decode(plain, skip, priority=priority, timeout=timeout)
    return text


async def _beside(run: Callable[[], T], timeout_s: float | None) -> T:
    """What `run` gives on a thread beside the loop; of those there are as many as CPUs."""
    limiter = _THREADS.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(os.cpu_count() or 1)
        _THREADS.set(limiter)
    with anyio.move_on_after(timeout_s):
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=limiter)
    raise DeadlineExceededError(f"tokenizing took longer than {timeout_s} s")


def _need(tokenizer: object) -> None:
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer needs a layerzero.Tokenizer, got {type(tokenizer).__name__}")
