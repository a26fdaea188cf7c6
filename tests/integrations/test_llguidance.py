"""Grammars of llguidance as masks: what they allow, how they end, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import layerzero as lz

pytest.importorskip("llguidance", reason="grammars need llguidance: pip install 'layerzero-runtime[grammar]'")

from layerzero.integrations.llguidance import Grammar, Grammars

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "data" / "generate"
VOCAB = 1024
END = 1


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Grammars over the tokenizer of the checkout."""
    return Grammars((FOLDER / "tokenizer.json").read_text(encoding="utf-8"), VOCAB, [END])


def written(grammar: Grammar, seed: int, longest: int = 60) -> tuple[str, bool]:
    """A text drawn from equal logits under `grammar`, and whether it came to its end."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokens: list[int] = []
    for offset in range(longest):
        if grammar.ended:
            break
        logits = lz.adjust_logits(torch.zeros(1, VOCAB), allowed=grammar.allowed().unsqueeze(0))
        token = int(lz.sync.sample(logits, seed=seed, offset=offset))
        if token == END:
            return tokenizer.decode(tokens), True
        grammar.accept(token)
        tokens.append(token)
    return tokenizer.decode(tokens), grammar.ended


@pytest.mark.parametrize("pattern", ["a{2,4}b?", "[0-9]+\\.[0-9]{2}", "(yes|no)"])
def test_texts_match_the_pattern(grammars: Grammars, pattern: str) -> None:
    """Twenty random texts under the mask: each that ends matches the whole pattern."""
    texts = [written(grammars.regex(pattern), seed) for seed in range(20)]
    assert sum(ended for _, ended in texts) >= 10
    assert all(re.fullmatch(pattern, text) for text, ended in texts if ended)


def test_texts_are_json_of_the_schema(grammars: Grammars) -> None:
    """An object of two fields, with at most one space between its parts."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(10):
        text, ended = written(grammars.json_schema(schema), seed)
        assert ended and "  " not in text
        value = json.loads(text)
        assert set(value) == {"a", "b"} and type(value["a"]) is bool and value["b"] in (1, 2)


def test_a_token_that_is_not_allowed_is_refused(grammars: Grammars) -> None:
    """The text cannot leave its grammar."""
    grammar = grammars.regex("a")
    with pytest.raises(ValueError, match="token needs one that the grammar allows"):
        grammar.accept(5)


def test_a_copy_goes_its_own_way(grammars: Grammars) -> None:
    """Both begin where the first was, and neither moves the other."""
    first = grammars.regex("[ab]c")
    copy = first.copy()
    before = first.allowed()
    first.accept(token_of("a"))
    assert torch.equal(copy.allowed(), before) and not torch.equal(first.allowed(), before)


def token_of(text: str) -> int:
    """The one token of a text."""
    from tokenizers import Tokenizer

    (token,) = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return int(token)


def test_a_limit_of_the_library_is_no_fault_of_the_token(grammars: Grammars) -> None:
    """A token that was allowed is followed or the grammar is at its limits; another one is refused."""
    schema = {"type": "string", "pattern": "^(a+)+$", "minLength": 3000}
    grammar = grammars.json_schema(schema)
    grammar.allowed()
    with pytest.raises(lz.GrammarLimitError, match=r"cannot be followed: .*too many"):
        grammar.accept(token_of('"'))
    for token in (token_of("a"), VOCAB, 5 * VOCAB):
        grammar = grammars.json_schema(schema)
        grammar.allowed()
        with pytest.raises(ValueError, match="token needs one that the grammar allows"):
            grammar.accept(token)


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("regex", "a(b", "regex needs a grammar"),
        ("regex", 5, "regex needs a string"),
        ("regex", "[^\\s\\S]", "regex needs a grammar that can be followed"),
        ("json_schema", {"$ref": "#"}, "schema needs a grammar that can be followed"),
        ("json_schema", {"type": "strin"}, "schema needs a grammar"),
        ("json_schema", [], "schema needs an object"),
        ("json_schema", {"type": "object", "patternProperties": 5}, "schema needs a grammar"),
    ],
)
def test_what_is_no_grammar_is_named(grammars: Grammars, kind: str, asked: object, message: str) -> None:
    """The message begins with the argument and is one line."""
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        getattr(grammars, kind)(asked)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_a_text_needs_an_end() -> None:
    """A model without a token that ends a text cannot follow a grammar."""
    with pytest.raises(ValueError, match="eos_token_ids needs"):
        Grammars((FOLDER / "tokenizer.json").read_text(encoding="utf-8"), VOCAB, [])
