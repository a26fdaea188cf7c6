"""The shape of a Llama, as its folder describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layerzero as lz


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama, as `config.json` of its folder gives it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: lz.LinearScaling | lz.Llama3Scaling | lz.YarnScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """Read `folder / "config.json"`.

        Raises: ValueError: the model is no Llama, or scales its rotary angles in a way unknown here.
        """
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if values.get("model_type") != "llama" or values.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"folder needs a Llama with silu, got {values.get('model_type')!r} with "
                f"{values.get('hidden_act')!r} in {folder}"
            )
        rotary = values.get("rope_parameters") or {}
        end = values.get("eos_token_id")
        return cls(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=values["num_attention_heads"],
            num_key_value_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=float(rotary.get("rope_theta", values.get("rope_theta", 10000.0))),
            max_position_embeddings=values["max_position_embeddings"],
            rope_scaling=_scaling(values.get("rope_scaling") or rotary, values["max_position_embeddings"]),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            attention_bias=values.get("attention_bias", False),
            mlp_bias=values.get("mlp_bias", False),
            eos_token_ids=frozenset(() if end is None else [end] if isinstance(end, int) else end),
        )


def _scaling(
    values: Mapping[str, Any], positions: int
) -> lz.LinearScaling | lz.Llama3Scaling | lz.YarnScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    factor, trained = values["factor"], values.get("original_max_position_embeddings", positions)
    if kind == "linear":
        return lz.LinearScaling(factor)
    if kind == "llama3":
        return lz.Llama3Scaling(factor, values["low_freq_factor"], values["high_freq_factor"], trained)
    if kind == "yarn":
        return lz.YarnScaling(factor, trained, values.get("beta_fast", 32.0), values.get("beta_slow", 1.0))
    raise ValueError(f"rope_scaling needs default, linear, llama3 or yarn, got {kind!r}")
