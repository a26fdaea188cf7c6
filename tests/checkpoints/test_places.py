"""What stands at a model's files may be a pipe or a device: those are refused, not waited for or read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.checkpoints.folder import INDEX

DEVICE = Path("/dev/null")  # a pipe and /dev/zero, which never end, are told from files as it is


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_a_checkpoint_is_of_plain_files(name: str, tmp_path: Path) -> None:
    """By the file's name, with a reason code."""
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(DEVICE)
    with pytest.raises(lz.FormatError, match=f"{name} needs .*no plain file"):
        lz.load_quantized(tmp_path)


def test_a_models_sizes_are_in_a_plain_file(tmp_path: Path) -> None:
    """As a path of its own and in its folder."""
    (tmp_path / "config.json").symlink_to(DEVICE)
    for path in (DEVICE, tmp_path):
        with pytest.raises(lz.ConfigurationError, match="no plain file"):
            lz.Manifest.of_model(path)
