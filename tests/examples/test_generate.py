"""The loop of one request and its text: whole characters, stop strings, pages that come back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz

generate = pytest.importorskip("generate", reason="the example needs safetensors and tokenizers")
server_text = pytest.importorskip("server.text", reason="the server needs tokenizers")
llama = pytest.importorskip("models.llama", reason="the example needs safetensors")

TOKENIZER = generate.load_tokenizer()
WORDS = st.text(alphabet="ab\u00e9\u4e2d\U0001f600 .", max_size=40)


def pieces(written: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """What `IncrementalDetokenizer` gives for a text, one piece a token and one at the end; whether it
    stopped."""
    words = server_text.IncrementalDetokenizer(TOKENIZER, stop)
    given_out = []
    for token in TOKENIZER.encode(written, add_special_tokens=False).ids:
        given_out.append(words.feed(token))
        if words.stopped:
            break
    return [*given_out, words.end()], words.stopped


@given(WORDS)
def test_pieces_are_the_text(text: str) -> None:
    """Nothing is lost or changed, and no piece holds half a character."""
    parts, stopped = pieces(text)
    assert "".join(parts) == text
    assert not stopped
    assert not any("\ufffd" in part for part in parts)


@given(WORDS, st.lists(st.text(alphabet="ab\u00e9 .", min_size=1, max_size=5), max_size=4))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """What is given is the text up to the first stop string, however tokens cut it."""
    parts, stopped = pieces(text, tuple(stops))
    ends = [text.index(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    # Two stop strings may overlap: the one that is complete first ends the text.
    wanted = {text[:end] for end in ends} or {text}
    assert "".join(parts) in wanted


def test_half_a_character_at_the_end_is_given_as_it_is() -> None:
    """Tokens may end inside a character: its bytes are not swallowed."""
    ids = TOKENIZER.encode("\u4e2d", add_special_tokens=False).ids
    assert len(ids) > 1
    words = server_text.IncrementalDetokenizer(TOKENIZER)
    assert words.feed(ids[0]) == ""
    assert "\ufffd" in words.end()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any], named: str) -> None:
    """The message begins with the argument."""
    with pytest.raises(ValueError, match=f"^{named} needs"):
        generate.SamplingParams(**values)


@pytest.mark.asyncio
async def test_a_request_that_is_left_gives_its_pages_back() -> None:
    """Ended, closed after a token, cancelled at any moment: the pool is full again every time."""
    async with lz.start(lz.Settings(device="cpu", inference=True)) as runtime:
        model = llama.load(pages=16)
        sampling = generate.SamplingParams(max_tokens=20, seed=1)
        prompt = TOKENIZER.encode("In the beginning").ids

        async def whole() -> list[int]:
            return [token async for token in generate.generate(model, prompt, sampling)]

        tokens = await whole()
        assert 0 < len(tokens) <= 20
        assert await whole() == tokens
        async with aclosing(generate.generate(model, prompt, sampling)) as begun:
            assert await anext(begun) == tokens[0]
            assert model.cache.allocator.free_pages < 16
        assert model.cache.allocator.free_pages == 16
        for turns in range(12):
            task = asyncio.ensure_future(whole())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert model.cache.allocator.free_pages == 16
        assert await whole() == tokens
        stats = runtime.device("cpu").loop_drivers.stats()
        assert (
            stats.submitted == stats.ended + runtime.device("cpu").loop_drivers.current().batcher.unfinished
        )


@pytest.mark.asyncio
async def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    async with lz.start(lz.Settings(device="cpu", inference=True)):
        with pytest.raises(ValueError, match="prompt needs at least one token"):
            await anext(generate.generate(llama.load(pages=4), [], generate.SamplingParams()))
