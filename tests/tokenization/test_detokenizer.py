"""Text as tokens are drawn: whole characters, stop strings, nothing lost, whichever library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.tokenization.tokenizer import Tokenizer
from tests.tokenization.made import NUM_RANKS, SENTENCES, encoding, processor, tekken, trained

WORDS = st.text(alphabet="ab\u00e9\u4e2d\U0001f600 .", max_size=40)
LIBRARIES = ("tokenizers", "tiktoken", "sentencepiece", "mistral_common")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer of each library."""
    return {
        "tokenizers": Tokenizer(trained()),
        "tiktoken": Tokenizer(encoding()),
        "sentencepiece": Tokenizer(processor()),
        "mistral_common": Tokenizer(tekken(tmp_path_factory.mktemp("mistral"))),
    }


@pytest.fixture(scope="module", params=LIBRARIES)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each of them."""
    return tokenizers[request.param]


def pieces(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """One piece a token and one at the end; whether it stopped."""
    words = lz.IncrementalDetokenizer(tokenizer, stop)
    given_out = []
    for token in ids:
        given_out.append(words.feed(token))
        if words.stopped:
            break
    return [*given_out, words.end()], words.stopped


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[list[int], str]:
    """A text's ids, and what they stand for: a normalizer may have changed the text."""
    (tokens,) = tokenizer.encode([text])
    return tokens.ids.tolist(), tokenizer.decode([tokens.ids])[0]


@given(WORDS)
def test_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Nothing is lost or changed, and no piece holds half a character; special tokens have no text."""
    ids, whole = ids_of(tokenizer, text)
    parts, stopped = pieces(tokenizer, ids)
    assert "".join(parts) == whole
    assert not stopped
    assert not any("\ufffd" in part for part in parts)


def test_prose_comes_a_piece_a_token(tokenizer: Tokenizer) -> None:
    """What a token completes is given with it, not at the end."""
    ids, whole = ids_of(tokenizer, SENTENCES[3])
    parts, _ = pieces(tokenizer, ids)
    assert "".join(parts) == whole and parts[-1] == ""
    assert sum(map(bool, parts)) >= len(ids) - 3


@given(WORDS, st.lists(st.text(alphabet="ab\u00e9 .", min_size=1, max_size=5), max_size=4))
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """What is given is the text up to the first stop string, however tokens cut it."""
    ids, whole = ids_of(tokenizer, text)
    parts, stopped = pieces(tokenizer, ids, tuple(stops))
    # Two stop strings may overlap: the one that is complete first ends the text.
    found = [(whole.index(stop) + len(stop), whole.index(stop)) for stop in stops if stop in whole]
    assert stopped == bool(found)
    assert "".join(parts) == (whole[: min(found)[1]] if found else whole)


@pytest.mark.parametrize("texts", [["abc"], ["ab", "c"], ["a", "bc"], ["a", "b", "c"]])
def test_a_stop_string_inside_another_ends_the_text_alike(texts: list[str]) -> None:
    """Whether one token brings both or several do: the one that is complete first counts."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"bc": 257, b"abc": 258}
    tokenizer = Tokenizer(tiktoken.Encoding("stops", pat_str=".+", mergeable_ranks=ranks, special_tokens={}))
    parts, stopped = pieces(tokenizer, [ranks[text.encode()] for text in texts], ("abc", "b"))
    assert stopped and "".join(parts) == "a"


def test_a_stop_string_of_any_length_costs_a_look_a_character(tokenizers: dict[str, Tokenizer]) -> None:
    """One of a request's may be as long as its body: others' tokens do not wait for it."""
    looks = 0

    class Counted(str):
        """A stop string that counts how often it is compared or cut."""

        def startswith(self, *args: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().startswith(*args)

        def __getitem__(self, index: Any) -> str:
            nonlocal looks
            looks += 1
            return super().__getitem__(index)

    tokenizer = tokenizers["tiktoken"]
    ids, whole = ids_of(tokenizer, "a b " * 100)
    for first in ("b", "a b a c", "a b " * 50):  # nothing, a little, and most is held back
        looks, stops = 0, (Counted("c" * 10_000), Counted(first + "c" * 10_000))
        parts, _ = pieces(tokenizer, ids, stops)
        assert "".join(parts) == whole and looks <= 2 * len(stops) * (len(whole) + len(ids))


def test_nothing_follows_a_stop_string(tokenizers: dict[str, Tokenizer]) -> None:
    """Tokens that are fed afterwards are no text any more."""
    tokenizer = tokenizers["tiktoken"]
    words = lz.IncrementalDetokenizer(tokenizer, ["b"])
    given_out = [words.feed(token) for token in ids_of(tokenizer, "a b c")[0]]
    assert words.stopped and "".join(given_out) == "a " and words.end() == ""


def test_half_a_character_at_the_end_is_given_as_it_is(tokenizer: Tokenizer) -> None:
    """Tokens may end inside a character: its bytes are not swallowed."""
    (tokens,) = tokenizer.encode(["\u4e2d"], special_tokens=False)
    ids = tokens.ids.tolist()
    assert len(ids) > 2
    words = lz.IncrementalDetokenizer(tokenizer)
    assert "".join(words.feed(token) for token in ids[:-1]).strip() == ""
    assert "\ufffd" in words.end()


def test_bytes_that_are_no_text_do_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    """A model that draws nothing but ends of characters gets replacement characters as it goes."""
    (tokens,) = tokenizer.encode(["\u4e2d"], special_tokens=False)
    last = tokens.ids[-1].item()
    words = lz.IncrementalDetokenizer(tokenizer)
    given_out = [words.feed(int(last)) for _ in range(200)]
    assert sum(map(bool, given_out)) >= 40 and len(words._ids) < 20
    assert set("".join(given_out) + words.end()) == {"\ufffd"}


def test_ids_without_a_token_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    """Rows that fill a model's vocabulary may be drawn: the text goes on."""
    tokenizer = tokenizers["tiktoken"]
    first, second = ids_of(tokenizer, "ab")[0][0], ids_of(tokenizer, "é")[0]
    words = lz.IncrementalDetokenizer(tokenizer)
    drawn = [first, NUM_RANKS + 1, second[0], 10**6, *second[1:]]
    assert "".join(words.feed(token) for token in drawn) == tokenizer.token_text(first) + "é"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("text",), TypeError, "tokenizer needs a layerzero.Tokenizer, got str"),
        (("", "stop"), ValueError, "stop needs a sequence of texts"),
        (("", [""]), ValueError, "stop needs a sequence of texts that are not empty"),
    ],
)
def test_wrong_arguments_are_named(
    tokenizers: dict[str, Tokenizer], arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    """One string is not several, and an empty one would stop everything."""
    source = arguments[0] or tokenizers["tiktoken"]
    with pytest.raises(error, match=words):
        lz.IncrementalDetokenizer(source, *arguments[1:])


def test_the_examples_tokenizer_streams(tmp_path: Path) -> None:
    """The model of the checkout has a decoder of bytes, and its pieces are the text."""
    tokenizer = Tokenizer(Path(__file__).parents[2] / "examples" / "data" / "generate")
    ids, whole = ids_of(tokenizer, "And it came to pass, naïve 👩‍👩‍👧.")
    assert "".join(pieces(tokenizer, ids)[0]) == whole
