"""Prompts found again: the same tokens, within a bound of bytes, never another tokenizer's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import layerzero as lz
from layerzero.spec.reasons import Reason
from layerzero.tokenization.prompts import ENTRY_BYTES, PromptCache, PromptCacheStats
from layerzero.tokenization.tokenizer import Tokenizer
from layerzero.tokenization.tokens import Tokens
from tests.tokenization.made import SENTENCES, encoding, trained

SYSTEM = "You are a helpful assistant. " * 20


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    """The CPU's device, opened outside of a loop: probing it reads files."""
    lz.sync.rms_norm(torch.ones(1, 8))


class Counted(Tokenizer):
    """A tokenizer that counts the texts that it encodes."""

    encoded = 0

    def encode_rows(self, texts: list[str], options: list[Any]) -> list[Tokens]:
        """As it is, and counted."""
        self.encoded += len(texts)
        return super().encode_rows(texts, options)


def ask(tokenizer: Tokenizer, text: str, **options: Any) -> Tokens:
    """One awaited call."""

    async def go() -> Tokens:
        return await lz.tokenize(text, tokenizer, **options)

    return anyio.run(go)


def test_a_prompt_is_encoded_once() -> None:
    """Again with the same options it is a copy of the same tokens; with others it is encoded."""
    tokenizer = Counted(trained(), cache=PromptCache())
    first = ask(tokenizer, SYSTEM, offsets=True)
    first.ids[0] = 7  # a caller may write into its own
    again = ask(tokenizer, SYSTEM, offsets=True)
    (right,) = tokenizer.encode([SYSTEM], offsets=True)
    assert torch.equal(again.ids, right.ids) and again.ids.dtype == torch.int64
    assert again.offsets is not None and right.offsets is not None
    assert torch.equal(again.offsets, right.offsets)
    assert tokenizer.encoded == 1
    others: list[dict[str, Any]] = [{}, {"special_tokens": False}, {"max_tokens": 5}, {"parse_special": True}]
    for options in others:
        (right,) = tokenizer.encode([SYSTEM], **options)
        for _ in range(2):
            assert torch.equal(ask(tokenizer, SYSTEM, **options).ids, right.ids)
    assert tokenizer.encoded == 5
    assert tokenizer.cache is not None
    stats = tokenizer.cache.stats()
    assert (stats.entries, stats.hits, stats.misses) == (5, 5, 5)


def test_an_empty_prompt_is_kept_too() -> None:
    """It has no ids, and offsets of none."""
    tokenizer = Counted(encoding(), cache=PromptCache())
    for _ in range(2):
        tokens = ask(tokenizer, "", offsets=True)
        assert tokens.ids.shape == (0,) and tokens.offsets is not None and tokens.offsets.shape == (0, 2)
    assert tokenizer.encoded == 1


def test_two_tokenizers_share_a_cache_without_mixing() -> None:
    """Each has its own tokens for one text, whatever the order; namespaces of one model are apart."""
    cache = PromptCache()
    both = [Counted(trained(300), cache=cache), Counted(trained(350, normalizer="Lowercase"), cache=cache)]
    for at in range(200):
        tokenizer, text = both[at % 2], SENTENCES[at % 7]
        assert torch.equal(ask(tokenizer, text).ids, tokenizer.encode([text])[0].ids)
    assert [tokenizer.encoded for tokenizer in both] == [7, 7]
    source = trained(300)
    apart = [Counted(source, cache=cache, namespace=name) for name in ("one", "two")]
    for tokenizer in apart:
        ask(tokenizer, SYSTEM)
    assert [tokenizer.encoded for tokenizer in apart] == [1, 1]


def test_the_bound_holds_and_the_longest_unused_go_first() -> None:
    """After a thousand prompts of any length the bytes stay below the bound; what was used is still there."""
    cache = PromptCache(64 << 10)
    tokenizer = Counted(encoding(), cache=cache)
    ask(tokenizer, SYSTEM)
    for at in range(300):
        ask(tokenizer, f"{at} {SENTENCES[at % 40]}")
        ask(tokenizer, SYSTEM)
        assert cache.stats().bytes <= cache.max_bytes
    stats = cache.stats()
    assert tokenizer.encoded == 301 and stats.evicted == 301 - stats.entries > 100
    assert stats.bytes == sum(entry.size for entry in cache._entries.values())
    assert stats.bytes >= stats.entries * ENTRY_BYTES
    ask(tokenizer, SYSTEM * 40)  # larger than all of it: not kept, and nothing goes for it
    assert cache.stats().entries == stats.entries
    with pytest.raises(ValueError, match="max_bytes needs an int >= 1, got 0"):
        PromptCache(0)


def test_a_file_that_changed_under_a_cache_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a reason code, told and counted, until it is forgotten; without the cache it is another one."""
    file, cache = tmp_path / "tokenizer.json", PromptCache()
    trained(300).save(str(file))
    tokenizer = Tokenizer(file, cache=cache)
    ask(tokenizer, SYSTEM)
    assert Tokenizer(tmp_path, cache=cache).identity == tokenizer.identity
    trained(320).save(str(file))
    with pytest.raises(
        lz.TokenizerMismatchError, match=r"tokenizer\.json has changed under a cache"
    ) as refused:
        Tokenizer(file, cache=cache)
    assert refused.value.problem.reason is Reason.TOKENIZER_CHANGED and str(file) in str(refused.value)
    assert Tokenizer(file).identity != tokenizer.identity
    assert torch.equal(ask(tokenizer, SYSTEM).ids, tokenizer.encode([SYSTEM])[0].ids)  # it is what it was
    assert cache.forget(str(file)) == 1
    assert cache.stats() == PromptCacheStats(0, 0, 1, 1, 0, 1)
    (told,) = [text for each in caplog.records if "tokenizer.refused" in (text := each.getMessage())]
    assert str(file) in told
    changed = Tokenizer(file, cache=cache)
    assert torch.equal(ask(changed, SYSTEM).ids, changed.encode([SYSTEM])[0].ids)


def test_threads_share_a_cache() -> None:
    """Its bytes are those of its entries when all have ended, and nobody got another's tokens."""
    cache = PromptCache(40 << 10)
    tokenizer = Tokenizer(encoding(), cache=cache)
    right = {text: tokenizer.encode([text])[0].ids for text in SENTENCES[:60]}
    wrong: list[str] = []

    def work(first: int) -> None:
        async def go() -> None:
            for at in range(240):
                text = SENTENCES[(first * 13 + at) % 60]
                if not torch.equal((await lz.tokenize(text, tokenizer)).ids, right[text]):
                    wrong.append(text)

        anyio.run(go)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert not wrong and stats.hits + stats.misses == 4 * 240
    assert stats.bytes == sum(entry.size for entry in cache._entries.values()) <= cache.max_bytes
