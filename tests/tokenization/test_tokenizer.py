"""Tokens equal the library's, alone and in any batch; identities follow what decides; models do not mix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import torch

import layerzero as lz
from layerzero.spec.errors import ConfigurationError
from layerzero.tokenization.identity import Identity, identify
from layerzero.tokenization.tokenize import LONG
from layerzero.tokenization.tokenizer import Tokenizer
from layerzero.tokenization.tokens import EncodeOptions, Tokens
from tests import children
from tests.tokenization.made import ODD, SENTENCES, trained


@pytest.fixture(scope="module", autouse=True)
def opened() -> None:
    """The CPU's device, opened outside of a loop: probing it reads files."""
    lz.sync.rms_norm(torch.ones(1, 8))


@pytest.fixture(scope="module")
def library() -> Any:
    return trained()


@pytest.fixture(scope="module")
def tokenizer(library: Any) -> Tokenizer:
    return Tokenizer(library)


@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_offsets_are_the_librarys(tokenizer: Tokenizer, library: Any, special: bool) -> None:
    """Ids and character offsets are exactly those of a direct call, for prose and for odd text."""
    texts = SENTENCES[:50] + ODD
    found = tokenizer.encode(texts, special_tokens=special, offsets=True)
    for text, tokens in zip(texts, found, strict=True):
        right = library.encode(text, add_special_tokens=special)
        assert tokens.ids.tolist() == right.ids
        assert tokens.offsets is not None
        assert [tuple(pair) for pair in tokens.offsets.tolist()] == list(right.offsets)


def test_decoding_gives_the_text_back(tokenizer: Tokenizer) -> None:
    """NFC text survives; special tokens appear only where they are options for."""
    rows = [tokens.ids for tokens in tokenizer.encode(SENTENCES[:20])]
    assert tokenizer.decode(rows) == SENTENCES[:20]
    assert tokenizer.decode(rows[:1], skip_special_tokens=False)[0] == f"<s>{SENTENCES[0]}</s>"


def test_concurrent_callers_get_what_they_get_alone(tokenizer: Tokenizer) -> None:
    """64 callers with mixed flags: each gets its own tokens and its own text back."""
    texts = [*SENTENCES[:56], *ODD]
    results: list[Any] = [None] * len(texts)

    async def one(at: int) -> None:
        tokens = await lz.tokenize(texts[at], tokenizer, special_tokens=at % 2 == 0, offsets=at % 3 == 0)
        text = await lz.detokenize(tokens.ids, tokenizer, skip_special_tokens=at % 5 != 0)
        results[at] = tokens, text

    async def go() -> None:
        async with anyio.create_task_group() as group:
            for at in range(len(texts)):
                group.start_soon(one, at)

    anyio.run(go)
    for at, (tokens, text) in enumerate(results):
        (alone,) = tokenizer.encode([texts[at]], special_tokens=at % 2 == 0, offsets=at % 3 == 0)
        assert torch.equal(tokens.ids, alone.ids) and (tokens.offsets is None) == (at % 3 != 0)
        assert text == tokenizer.decode([alone.ids], skip_special_tokens=at % 5 != 0)[0]


def test_padding_of_the_source_never_reaches_a_batch() -> None:
    """A tokenizer that pads would give a short text other ids beside a long one."""
    padded = trained(300)
    padded.enable_padding(pad_id=0, pad_token="<s>")
    assert len(padded.encode_batch(["a", SENTENCES[0]])[0].ids) > 10
    tokenizer = Tokenizer(padded)
    short, _ = tokenizer.encode(["a", SENTENCES[0]])
    assert torch.equal(short.ids, tokenizer.encode(["a"])[0].ids)


def test_a_later_change_of_the_source_is_another_tokenizer() -> None:
    """What was wrapped stays what its identity says."""
    source = trained(300)
    tokenizer = Tokenizer(source)
    before = tokenizer.encode(["The end."])[0].ids
    source.add_tokens(["The end."])
    assert torch.equal(tokenizer.encode(["The end."])[0].ids, before)
    assert Tokenizer(source).identity.digest != tokenizer.identity.digest


def test_the_identity_follows_what_decides(library: Any) -> None:
    """Vocabulary, merges, normalizer, pre-tokenizer and special tokens each change the digest, and say so."""
    plain = json.loads(library.to_str())
    base = identify(plain)
    assert base.normalizer == "NFC" and base.pretokenizer == "ByteLevel"
    changed = {
        "vocabulary": plain | {"model": plain["model"] | {"vocab": {"a": 0}}},
        "merges": plain | {"model": plain["model"] | {"merges": []}},
        "special_tokens": plain | {"added_tokens": []},
        "normalizer": plain | {"normalizer": {"type": "NFKC"}},
        "pretokenizer": plain | {"pre_tokenizer": None},
    }
    for field, definition in changed.items():
        other = identify(definition)
        assert other.digest != base.digest
        different = {f for f in base.__struct_fields__ if getattr(other, f) != getattr(base, f)}
        assert different == {"digest", field}
    assert identify(plain | {"padding": {"strategy": "BatchLongest"}}) == base
    digests = {name: getattr(base, name) for name in base.__struct_fields__}
    for name in ("digest", "vocabulary"):
        with pytest.raises(ValueError, match=f"{name} needs a SHA-256 digest"):
            Identity(**digests | {name: "abc"})
        with pytest.raises(TypeError, match=name):
            Identity(**{key: value for key, value in digests.items() if key != name})
    assert identify(plain | {"truncation": {"max_length": 4}}).digest != base.digest


def test_the_identity_is_the_same_in_another_process(
    library: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """No address, order of a dict or hash seed is in it."""
    file = tmp_path / "tokenizer.json"
    library.save(str(file))
    code = f"from layerzero import Tokenizer; print(Tokenizer({str(tmp_path)!r}).identity.digest)"
    other_seed = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=other_seed
    )
    assert run.stdout.strip() == tokenizer.identity.digest == Tokenizer(file).identity.digest


def test_two_models_do_not_mix() -> None:
    """Interleaved calls of two tokenizers equal isolated ones."""
    both = [Tokenizer(trained(300)), Tokenizer(trained(350, normalizer="Lowercase"))]
    results: dict[tuple[int, int], list[int]] = {}

    async def one(which: int, at: int) -> None:
        tokens = await lz.tokenize(SENTENCES[at], both[which])
        results[which, at] = tokens.ids.tolist()

    async def go() -> None:
        async with anyio.create_task_group() as group:
            for at in range(100):
                group.start_soon(one, at % 2, at)

    anyio.run(go)
    for (which, at), ids in results.items():
        assert ids == both[which].encode([SENTENCES[at]])[0].ids.tolist()


def test_one_bad_caller_fails_alone(tokenizer: Tokenizer) -> None:
    """An id that is not in the vocabulary is named, and nobody else notices."""
    outcomes: list[Any] = [None] * 4

    async def one(at: int) -> None:
        ids = torch.tensor([5, 10**6 if at == 2 else 7])
        try:
            outcomes[at] = await lz.detokenize(ids, tokenizer)
        except ValueError as error:
            outcomes[at] = error

    async def go() -> None:
        async with anyio.create_task_group() as group:
            for at in range(4):
                group.start_soon(one, at)

    anyio.run(go)
    assert "got 1000000 at position 1" in str(outcomes[2])
    assert [type(o) for o in outcomes] == [str, str, ValueError, str]


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.ones(2, 2).long(), TypeError, "ids needs a vector of int32 or int64"),
        (torch.ones(2), TypeError, "ids needs a vector"),
        ([1, 2], TypeError, "got list"),
        (torch.tensor([-1]), ValueError, r"ids needs ids in \[0, "),
    ],
)
def test_wrong_ids_are_named(tokenizer: Tokenizer, ids: Any, error: type[Exception], words: str) -> None:
    """The message says what ids need and what they are."""
    with pytest.raises(error, match=words):
        anyio.run(lz.detokenize, ids, tokenizer)


def test_wrong_texts_and_tokenizers_are_named(tokenizer: Tokenizer, library: Any) -> None:
    """Bytes are no text, and the library's own object is no Tokenizer."""
    with pytest.raises(TypeError, match="text needs a str, got bytes"):
        anyio.run(lz.tokenize, cast(Any, b"bytes"), tokenizer)
    with pytest.raises(TypeError, match=r"tokenizer needs a layerzero\.Tokenizer"):
        anyio.run(lz.tokenize, "text", library)
    with pytest.raises(TypeError, match=r"texts\[1\] needs a str, got int"):
        tokenizer.encode(["a", 3])  # type: ignore[list-item]


def test_a_source_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    """A missing file, broken JSON, JSON of something else, and something that is no path."""
    broken = tmp_path / "tokenizer.json"
    with pytest.raises(ConfigurationError, match=r"source needs a readable tokenizer\.json"):
        Tokenizer(broken)
    for text in ("{", '{"model": 3}', "[]"):
        broken.write_text(text)
        with pytest.raises(ConfigurationError, match="source needs a tokenizer's JSON"):
            Tokenizer(broken)
    with pytest.raises(TypeError, match="source needs a path"):
        Tokenizer(3)


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    """The message says what to install."""
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from layerzero import Tokenizer\n"
        "try: Tokenizer('x.json')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    run = children.run(code, folder=tmp_path)
    assert run.stdout.startswith("BackendNotAvailableError") and "layerzero-runtime[tokenizers]" in run.stdout


class Noting(Tokenizer):
    """A tokenizer that notes the thread which encodes, by the length of the first text."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.threads: dict[int, int] = {}

    def encode_rows(self, texts: list[str], options: list[EncodeOptions]) -> list[Tokens]:
        """As it is, and noted."""
        self.threads[len(texts[0])] = threading.get_ident()
        return super().encode_rows(texts, options)


@pytest.mark.asyncio
async def test_a_long_text_never_runs_on_the_thread_of_the_loop() -> None:
    """Not after many short ones either, whose cost says nothing of it."""
    tokenizer = Noting(trained())
    for _ in range(50):
        await lz.tokenize("a word", tokenizer)
    for words in (LONG // 8, 100_000):  # among the batches, and beside them
        long = "a word " * words
        await lz.tokenize(long, tokenizer)
        assert tokenizer.threads[len(long)] != threading.get_ident()
