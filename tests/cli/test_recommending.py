"""`lz recommend`: an engine's flags for a config.json, from the shell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.command import Lz

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A folder with a model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_flags_for_a_card_that_is_not_here(lz: Lz, config: Path) -> None:
    """A shipped table by name is enough: neither the card nor the engine is needed."""
    found = json.loads(lz("recommend", "sglang", str(config), "--device", "h200", "--json").output)
    decode = found["flags"][1]
    timed = [option for option in decode["options"] if option["loss"] is not None]
    assert found["device"] == "NVIDIA H200" and decode["flag"] == "--decode-attention-backend"
    assert len(timed) >= 2 and decode["value"] in {option["value"] for option in timed}
    assert min(option["loss"] for option in timed) == 0.0 and "shipped table" in decode["why"]
    assert f"--decode-attention-backend {decode['value']}" in found["command"]
    assert not {"vllm", "sglang"} & sys.modules.keys()
    told = lz("recommend", "vllm", str(config / "config.json"), "--device", "h200").output
    assert told.rstrip().splitlines()[-1].startswith("vllm serve ") and "rests on" in told


def test_this_machine_is_measured_first_where_asked(lz: Lz, tmp_path: Path) -> None:
    """On a CPU the engine's kernels are its own: the measuring runs, and every flag stays."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | sizes | {"num_key_value_heads": 2}))
    words = ("--device", "cpu", "--rows", "1", "--context", "16", "--tune-s", "1", "--json")
    found = json.loads(lz("recommend", "vllm", str(tmp_path), *words).output)
    assert {advice["value"] for advice in found["flags"]} == {"auto"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trtllm",), "engine needs one of vllm, sglang, got 'trtllm'"),
        (("vllm", "--device", "h201"), "got 'h201'; or the name of a table: amd_avx2"),
        (("vllm", "--device", "h200", "--tune-s", "5"), "--device h200 is a table"),
        (("vllm", "--rows", "0"), "rows needs a whole number"),
    ],
)
def test_wrong_words_are_explained(lz: Lz, config: Path, words: tuple[str, ...], said: str) -> None:
    """Status 2, and a sentence that names what is wrong."""
    result = lz("recommend", words[0], str(config), *words[1:])
    assert result.exit_code == 2 and said in result.output


def test_a_config_of_no_known_model_is_refused(lz: Lz, config: Path) -> None:
    """The field is named."""
    (config / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    result = lz("recommend", "vllm", str(config), "--device", "h200")
    assert result.exit_code == 2 and "model_type needs one of" in result.output and "'mamba'" in result.output
