"""Whole models beside themselves in float64: what holds, what is planted and named, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.gates.model_parity import ModelParity, compare_model
from layerzero.gates.release_file import ModelsStage
from layerzero.gates.stages import StageRunner
from layerzero.ops.norm.rms_norm import rms_norm_reference
from layerzero.runtime import Runtime
from layerzero.spec.errors import ConfigurationError
from tests.kernels import kernel

pytest.importorskip("transformers", reason="models are those of transformers")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
    "vocab_size": 64, "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A runtime of the test's own."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as opened:
        yield opened


def failing(compared: ModelParity) -> list[str]:
    """What of a checklist does not hold."""
    return [item.what for item in compared.checklist if item.holds is False]


@pytest.mark.parametrize("source", [LLAMA, T5], ids=["llama", "t5"])
def test_a_sound_model_passes_with_every_line_asked(runtime: Runtime, source: dict[str, Any]) -> None:
    """Layers, outputs, tokens and gradients hold; no line is left out for a model with a head."""
    compared = compare_model(source)
    assert compared.passed, failing(compared)
    assert all(item.holds for item in compared.checklist)
    names = {row.what for row in compared.rows}
    assert {
        "layer 2 output",
        "outputs of a padded batch",
        "generated tokens",
        "gradient of embeddings",
    } <= names
    assert compared.flags == ()


def test_a_planted_fault_fails_layers_outputs_and_gradients(runtime: Runtime, tmp_path: Path) -> None:
    """A norm that is a hundredth too large is named line by line, in the gate's stage too."""

    def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_reference(x, weight, eps) * 1.01

    runtime.add_kernel(kernel("planted.rms_norm", wrong, gradient=True))
    lz.lock("rms_norm", "planted.rms_norm")
    compared = compare_model(LLAMA)
    assert not compared.passed
    assert {"hidden states of every layer hold", "outputs hold, padding among them"} <= set(failing(compared))
    outcome = StageRunner(runtime, tmp_path).run("models", ModelsStage(models=(LLAMA,)))
    assert outcome.state == "failed" and outcome.checks == 9
    assert "models/llama/outputs hold, padding among them" in {finding.name for finding in outcome.findings}


def test_parts_that_stay_the_model_s_own_are_said(runtime: Runtime) -> None:
    """A checklist names each class that no op serves, and why."""
    gpt2 = {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    said = next(item.evidence for item in compare_model(gpt2).checklist if "run on our ops" in item.what)
    assert "2 GPT2MLP" in said and "Conv1D" in said


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"model_type": "nosuch"}, "needs a folder or name of a transformers model"),
        ({"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "intermediate_size": 48}, "takes pixel_values"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(runtime: Runtime, source: dict[str, Any], words: str) -> None:
    """An unknown family, and one whose inputs are no token ids."""
    with pytest.raises(ConfigurationError, match=words):
        compare_model(source)
