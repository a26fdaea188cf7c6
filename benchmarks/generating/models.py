"""The models that generation is measured with: the shipped one, and random ones of larger shapes."""

from __future__ import annotations

import torch
from models import llama
from models.llama import Llama, LlamaConfig, Per

# Long enough for a context of 2,048 and what is generated behind it.
POSITIONS = 4096


def shape(
    vocab: int, channels: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int,
    rope_base: float = 10_000.0,
) -> LlamaConfig:  # fmt: skip
    """A Llama with a head of its own."""
    return LlamaConfig(
        vocab_size=vocab, hidden_size=channels, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, rms_norm_eps=1e-5, rope_theta=rope_base, max_position_embeddings=POSITIONS,
    )  # fmt: skip


SHAPES = {
    "tiny": shape(64, 32, 48, 2, 4, 2, 8),
    "shipped": LlamaConfig.read(llama.FOLDER),
    "mid": shape(8192, 512, 1408, 4, 8, 4, 64),
    # Llama 3 8B with a quarter of its 32 layers.
    "8b-8": shape(128_256, 4096, 14_336, 8, 32, 8, 128, 500_000.0),
}


def build(
    name: str,
    *,
    pages: int,
    page_size: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    per: Per = "step",
) -> Llama:
    """The model `name` with a pool of `pages` pages that hold random keys and values.

    What a page holds changes no time; random contents keep every score finite and unlike its neighbours.
    """
    made = llama.load if name == "shipped" else None
    if made is not None:
        model = made(device=device, dtype=dtype, pages=pages, page_size=page_size, per=per)
    else:
        model = llama.random(
            SHAPES[name], device=device, dtype=dtype, pages=pages, page_size=page_size, per=per
        )
    for layer in model.layers:
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    return model


def described(config: LlamaConfig) -> str:
    """A shape in one line."""
    return (
        f"{config.num_hidden_layers} layers, {config.hidden_size} channels, "
        f"{config.num_attention_heads}/{config.num_key_value_heads} heads "
        f"of {config.head_dim}, {config.intermediate_size} inner, {config.vocab_size} words, "
        f"{parameters(config) / 1e6:.1f} M weights"
    )


def parameters(config: LlamaConfig) -> int:
    """How many weights a shape has."""
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size + 2)
    words = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_hidden_layers * layer + words + config.hidden_size
