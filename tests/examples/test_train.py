"""The training of the shipped model: what it reached, and that the script still runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

training = pytest.importorskip("train", reason="the script needs safetensors and tokenizers")


def held_out(count: int) -> list[str]:
    """The first `count` chapters that training leaves out."""
    return [text for index, text in enumerate(training.chapters()) if training.is_held_out(index)][:count]


def test_the_recorded_number_meets_the_bound() -> None:
    """At most 2.3 bits a byte on chapters that were not trained on."""
    record = json.loads((training.FOLDER / "training.json").read_text(encoding="utf-8"))
    assert record["held_out_bits_per_byte"] <= 2.3


def test_the_shipped_weights_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured here on three held-out chapters, from the files as they are shipped."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    texts = ["Nothing.\n", *held_out(3)]
    monkeypatch.setattr(training, "is_held_out", lambda index: index > 0)
    tokenizer = Tokenizer.from_file(str(training.FOLDER / "tokenizer.json"))
    text = training.Text(tokenizer, texts, torch.device("cpu"))
    stored = load_file(str(training.FOLDER / "model.safetensors"))
    weights = {name.removeprefix("model."): weight for name, weight in stored.items()}
    reached = training.bits_per_byte(training.Stored(weights, torch.device("cpu")), text)
    assert 0.5 < reached <= 2.3


def test_windows_count_every_token_once() -> None:
    """Whatever a chapter's length, its predictions are counted once each, none left out."""
    for tokens in (2, 100, 512, 513, 514, 768, 769, 770, 2000):
        counted: list[int] = []
        for start, skipped in training._windows(tokens):
            last = min(start + 2 * training.STRIDE + 1, tokens)
            counted += range(start + 1 + skipped, last)
        assert counted == list(range(1, tokens)), tokens


def test_the_script_trains_and_writes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small steps on forty chapters leave a folder that transformers loads."""
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    texts = training.chapters()[:40]
    monkeypatch.setattr(training, "chapters", lambda: texts)
    monkeypatch.setattr(training, "TOKENS_A_STEP", 512)
    monkeypatch.setattr(training, "LONG_FROM", 1.0)
    out = tmp_path / "made"
    given = ["train_generate", "--device", "cpu", "--steps", "2", "--measure", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    training.main()
    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert record["held_out_bits_per_byte"] < 8
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_key_value_heads == training.KV_HEADS
