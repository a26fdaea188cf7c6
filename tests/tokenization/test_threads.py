"""Tokenizing beside the loop: no interpreter's lock, no op that waits behind a long text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

import layerzero as lz
from layerzero.tokenization.tokenize import LONG
from layerzero.tokenization.tokenizer import Tokenizer
from tests.tokenization.made import SENTENCES, encoding, processor, tekken, trained

MADE: dict[str, Callable[[Path], Any]] = {
    "tokenizers": lambda folder: trained(),
    "tiktoken": lambda folder: encoding(),
    "sentencepiece": lambda folder: processor(),
    "mistral_common": tekken,
}
TEXT = " ".join(SENTENCES) * 4


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    """The CPU's device, opened outside of a loop: probing it reads files."""
    lz.sync.rms_norm(torch.ones(1, 8))


class Held:
    """A codec's `encode` or `decode` that waits inside until it is let go."""

    def __init__(self, tokenizer: Tokenizer, name: str, patch: pytest.MonkeyPatch) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._run = getattr(tokenizer.codec, name)
        patch.setattr(tokenizer.codec, name, self.run)

    def run(self, *arguments: Any) -> Any:
        """As it is, once it may."""
        self.inside.set()
        assert self.go.wait(60)
        return self._run(*arguments)


@pytest.mark.parametrize("library", MADE)
def test_a_text_is_encoded_without_the_interpreters_lock(library: str, tmp_path: Path) -> None:
    """Another thread runs Python meanwhile, of whichever library."""
    tokenizer = Tokenizer(MADE[library](tmp_path))
    state = {"began": False, "ended": False}

    def encode() -> None:
        state["began"] = True
        tokenizer.encode([TEXT])
        state["ended"] = True

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not state["ended"] and thread.is_alive():
        turns += state["began"]
    thread.join()
    assert turns > 200


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ops_do_not_wait_for_a_long_text(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is encoded or decoded, ops and texts of the same CPU are answered."""
    tokenizer, other = Tokenizer(encoding()), Tokenizer(trained())
    (right,) = tokenizer.encode([TEXT])
    x = torch.randn(64, 256)
    results: list[Any] = []

    async def long(call: Callable[[], Any]) -> None:
        results.append(await call())

    async def go() -> None:
        for name, call in (
            ("encode", lambda: lz.tokenize(TEXT, tokenizer)),
            ("decode", lambda: lz.detokenize(right.ids, tokenizer)),
        ):
            with monkeypatch.context() as patch:
                held = Held(tokenizer, name, patch)
                async with anyio.create_task_group() as group:
                    group.start_soon(long, call)
                    assert await anyio.to_thread.run_sync(held.inside.wait, 60)
                    for _ in range(20):
                        await lz.rms_norm(x)
                        assert len((await lz.tokenize("a word", other)).ids) > 2
                    assert len(results) == (name == "decode")
                    held.go.set()

    assert len(TEXT) >= LONG and len(right.ids) >= LONG
    anyio.run(go, backend=backend)
    assert torch.equal(results[0].ids, right.ids) and results[1] == TEXT


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_long_text_has_a_deadline_and_may_be_left(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its time it is an error of ours; who is cancelled goes at once; the next caller is served."""
    tokenizer = Tokenizer(encoding())
    held = Held(tokenizer, "encode", monkeypatch)

    async def go() -> None:
        with pytest.raises(lz.DeadlineExceededError, match=r"tokenizing took longer than 0\.01 s"):
            await lz.tokenize(TEXT, tokenizer, timeout=0.01)
        with anyio.move_on_after(0.01) as left:
            await lz.tokenize(TEXT, tokenizer)
        assert left.cancelled_caught
        held.go.set()
        assert len((await lz.tokenize(TEXT, tokenizer)).ids) >= LONG

    anyio.run(go, backend=backend)


def test_half_a_surrogate_pair_is_the_callers_mistake(tmp_path: Path) -> None:
    """A text that UTF-8 has no bytes for: the library's replacement, or an error for this caller alone."""
    for made in MADE.values():
        tokenizer = Tokenizer(made(tmp_path), cache=lz.PromptCache())
        outcomes: dict[str, Any] = {}

        async def one(text: str, of: Tokenizer = tokenizer, out: dict[str, Any] = outcomes) -> None:
            try:
                out[text] = await lz.tokenize(text, of)
            except ValueError as error:
                out[text] = error

        async def go(run: Any = one) -> None:
            async with anyio.create_task_group() as group:
                for text in ("a", "\ud800b", "c"):
                    group.start_soon(run, text)

        anyio.run(go)
        assert isinstance(outcomes["a"], lz.Tokens) and isinstance(outcomes["c"], lz.Tokens)
        bad = outcomes["\ud800b"]
        assert isinstance(bad, lz.Tokens) or "text needs characters that UTF-8 has" in str(bad)
