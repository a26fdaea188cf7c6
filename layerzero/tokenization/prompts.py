"""Prompts that were tokenized before, found again by digest, within a bound of bytes."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from layerzero._util import log
from layerzero.ops.checks import need_int
from layerzero.spec.errors import TokenizerMismatchError
from layerzero.spec.reasons import Reason, Rejected
from layerzero.tokenization.tokens import EncodeOptions, Tokens

# What an entry takes beside its numbers: the key's digests, the tuple, the place in the order.
ENTRY_BYTES = 512


class PromptCacheStats(msgspec.Struct, frozen=True):
    """What a cache holds and has counted."""

    entries: int
    bytes: int
    hits: int
    misses: int
    evicted: int
    refused: int


class _Prompt(NamedTuple):
    ids: bytes
    offsets: bytes | None

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.ids) + len(self.offsets or b"")


class PromptCache:
    """Tokens of prompts by the digests of tokenizer and text; the longest unused go first.

    A namespace belongs to one tokenizer. Where another comes under its name, as a file that has changed, it
    is refused until `forget`. What is found is a copy: a caller may change it. Threads may share a cache.

    Args: max_bytes: what entries may take together, their keys included.
    Raises: ValueError: max_bytes is below 1. TypeError: it is no int.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.max_bytes = need_int("max_bytes", max_bytes, low=1)
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Prompt] = OrderedDict()
        self._digests: dict[str, str] = {}
        self._bytes = self._hits = self._misses = self._evicted = self._refused = 0

    def admit(self, namespace: str, digest: str) -> None:
        """Have a tokenizer under its namespace.

        Raises: TokenizerMismatchError: the namespace belongs to another tokenizer, as to a file before it
            changed.
        """
        with self._lock:
            first_digest = self._digests.setdefault(namespace, digest)
            self._refused += first_digest != digest
        if first_digest != digest:
            log.warning("tokenizer.refused", namespace=namespace, needs=first_digest, got=digest)
            problem = Rejected(Reason.TOKENIZER_CHANGED, namespace, f"the tokenizer {first_digest}", digest)
            raise TokenizerMismatchError(
                f"{namespace} has changed under a cache: {problem}; forget({namespace!r}) empties it",
                problem=problem,
            )

    def forget(self, namespace: str) -> int:
        """Drop a namespace's entries, so that it may be another tokenizer's; how many they were."""
        with self._lock:
            self._digests.pop(namespace, None)
            dropped = [key for key in self._entries if isinstance(key, tuple) and key[0] == namespace]
            for key in dropped:
                self._bytes -= self._entries.pop(key).size
            return len(dropped)

    def stats(self) -> PromptCacheStats:
        """What it holds and has counted."""
        with self._lock:
            counted = self._hits, self._misses, self._evicted, self._refused
            return PromptCacheStats(len(self._entries), self._bytes, *counted)

    def find(self, key: Hashable) -> Tokens | None:
        """A copy of a prompt's tokens, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
        offsets = None if entry.offsets is None else _numbers(entry.offsets).view(-1, 2)
        return Tokens(_numbers(entry.ids), offsets)

    def keep(self, key: Hashable, tokens: Tokens) -> None:
        """Keep a copy of a prompt's tokens, unless it is larger than the whole cache may be."""
        offsets = None if tokens.offsets is None else _packed(tokens.offsets)
        entry = _Prompt(_packed(tokens.ids), offsets)
        if entry.size > self.max_bytes:
            return
        with self._lock:
            before = self._entries.pop(key, None)
            self._entries[key] = entry
            self._bytes += entry.size - (0 if before is None else before.size)
            while self._bytes > self.max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].size
                self._evicted += 1


def prompt_key(namespace: str, digest: str, text: str, options: EncodeOptions) -> Hashable:
    """What a prompt is found by: the tokenizer, its options, and the text's SHA-256 digest."""
    return namespace, digest, options, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _packed(numbers: Tensor) -> bytes:
    return array("i", numbers.flatten().tolist()).tobytes()


def _numbers(packed: bytes) -> Tensor:
    if not packed:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(packed), dtype=torch.int32).to(torch.int64)
