"""A Llama and a BERT written over the two sides of the ladder, recording every stage by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.parity.truth import Side

Record = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Config:
    """A model's shape; `inner` is the MLP's width."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    inner: int = 0
    vocab: int = 128
    rope: bool = True
    eps: float = 1e-5
    base: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


CONFIGS = {
    c.name: c
    for c in (
        Config("tiny", 64, 2, 2, 2),
        Config("gqa", 128, 8, 2, 2),
        Config("deep", 64, 2, 2, 6),
        Config("wide", 128, 8, 8, 2),
        Config("no_rope", 64, 2, 2, 2, rope=False),
        Config("medium", 256, 4, 4, 4),
    )
}


@dataclass
class Model:
    """A shape and its weights, under the names of Hugging Face's models."""

    config: Config
    weights: Mapping[str, Tensor]
    kind: str = "llama"
    source: str = ""
    cache: dict[str, Tensor] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype, grad: bool = False) -> Model:
        """The same model in another dtype, its floats as leaves where `grad`."""
        made = {
            name: w.detach().to(dtype).requires_grad_(grad) if w.is_floating_point() else w
            for name, w in self.weights.items()
        }
        return Model(self.config, made, self.kind, self.source)


def random_llama(config: Config, seed: int = 0) -> Model:
    """Weights of unit gain with heavy tails, as trained ones have."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        made = torch.randn(rows, columns, generator=generator)
        tails = torch.rand(rows, columns, generator=generator) < 0.002
        scale: float = columns**-0.5
        return (made + tails * made * 4) * scale

    c = config
    inner = c.inner or 2 * c.hidden
    weights = {
        "model.embed_tokens.weight": matrix(c.vocab, c.hidden) * c.hidden**0.5,
        "lm_head.weight": matrix(c.vocab, c.hidden),
        "model.norm.weight": torch.ones(c.hidden),
    }
    for i in range(c.layers):
        name = f"model.layers.{i}"
        weights |= {
            f"{name}.input_layernorm.weight": 1 + 0.1 * torch.randn(c.hidden, generator=generator),
            f"{name}.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(c.hidden, generator=generator),
            f"{name}.self_attn.q_proj.weight": matrix(c.hidden, c.hidden),
            f"{name}.self_attn.k_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden),
            f"{name}.self_attn.v_proj.weight": matrix(c.kv_heads * c.head_dim, c.hidden),
            f"{name}.self_attn.o_proj.weight": matrix(c.hidden, c.hidden),
            f"{name}.mlp.gate_proj.weight": matrix(inner, c.hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, c.hidden),
            f"{name}.mlp.down_proj.weight": matrix(c.hidden, inner),
        }
    return Model(config, weights, "llama", f"random, seed {seed}")


def llama_layer(side: Side, model: Model, index: int, x: Tensor, record: Record, start: int = 0) -> Tensor:
    """One decoder layer for one sequence (S, C) whose first row stands at position `start`.

    Keys and values of earlier rows come from `model.cache`, and this call's are added to it.
    """
    c, name = model.config, f"model.layers.{index}"
    w = {k.removeprefix(name + "."): v for k, v in model.weights.items() if k.startswith(name + ".")}
    tag = f"layer {index}"
    normed = side.rms_norm(x, w["input_layernorm.weight"], c.eps)
    record(f"{tag} ln1_out", normed)
    q, k, v = (
        side.linear(normed, w[f"self_attn.{part}_proj.weight"]).unflatten(-1, (-1, c.head_dim))
        for part in "qkv"
    )
    record(f"{tag} q_proj", q)
    record(f"{tag} k_proj", k)
    record(f"{tag} v_proj", v)
    if c.rope:
        q, k = side.rope(q, k, torch.arange(start, start + len(x)), c.base)
    record(f"{tag} q_rope", q)
    record(f"{tag} k_rope", k)
    past = model.cache.get(name) if start else None
    held = torch.stack([k, v])
    held = held if past is None else torch.cat([past, held], 1)
    model.cache[name] = held.detach()
    q, k, v = (t.transpose(0, 1)[None] for t in (q, held[0], held[1]))
    mixed, lse = side.attention(q, k, v, True)
    record(f"{tag} scores", lse)
    mixed = mixed[0].transpose(0, 1).flatten(1)
    record(f"{tag} attn_out", mixed)
    projected = side.linear(mixed, w["self_attn.o_proj.weight"])
    record(f"{tag} proj_out", projected)
    x = x + projected
    normed = side.rms_norm(x, w["post_attention_layernorm.weight"], c.eps)
    record(f"{tag} ln2_out", normed)
    up = torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]])
    record(f"{tag} fc1_out", side.linear(normed, up))
    with torch.no_grad():
        record(f"{tag} swiglu_out", _gated(side, normed, up))
    x = x + side.mlp(normed, up, w["mlp.down_proj.weight"], None, None, "swiglu")
    record(f"{tag} output", x)
    return x


def _gated(side: Side, x: Tensor, up: Tensor) -> Tensor:
    """The gated product alone: the same op before rows of the identity, as wide as its output may be."""
    inner, width = len(up) // 2, x.shape[-1]
    rows = torch.eye(inner + -inner % width, inner, dtype=x.dtype).split(width)
    return torch.cat([side.mlp(x, up, block, None, None, "swiglu") for block in rows], -1)[..., :inner]


def llama(side: Side, model: Model, ids: Tensor, record: Record, start: int = 0) -> Tensor:
    """The logits (S, V) of one sequence."""
    x = side.embedding(ids, model.weights["model.embed_tokens.weight"])
    record("embedding", x)
    for index in range(model.config.layers):
        x = llama_layer(side, model, index, x, record, start)
    normed = side.rms_norm(x, model.weights["model.norm.weight"], model.config.eps)
    record("norm", normed)
    head = model.weights.get("lm_head.weight", model.weights["model.embed_tokens.weight"])
    logits = side.linear(normed, head)
    record("logits", logits)
    return logits


def bert(side: Side, model: Model, ids: Tensor, record: Record) -> Tensor:
    """The last hidden states (S, C) of one sequence through a BERT encoder."""
    c, w = model.config, model.weights
    table = w["embeddings.position_embeddings.weight"] + w["embeddings.token_type_embeddings.weight"][0]
    x = side.embedding(ids, w["embeddings.word_embeddings.weight"]) + table[: len(ids)]
    x = side.layer_norm(x, w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], c.eps)
    record("embedding", x)

    def dense(name: str) -> tuple[Tensor, Tensor]:
        return w[f"{name}.weight"], w[f"{name}.bias"]

    for index in range(c.layers):
        tag, name = f"layer {index}", f"encoder.layer.{index}"
        q, k, v = (
            side.linear(x, *dense(f"{name}.attention.self.{part}")).unflatten(-1, (c.heads, -1))
            for part in ("query", "key", "value")
        )
        record(f"{tag} q_proj", q)
        record(f"{tag} k_proj", k)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        mixed, lse = side.attention(q, k, v, False)
        record(f"{tag} scores", lse)
        mixed = mixed[0].transpose(0, 1).flatten(1)
        record(f"{tag} attn_out", mixed)
        projected = side.linear(mixed, *dense(f"{name}.attention.output.dense"))
        record(f"{tag} proj_out", projected)
        x = side.layer_norm(x + projected, *dense(f"{name}.attention.output.LayerNorm"), c.eps)
        record(f"{tag} ln1_out", x)
        up, down = dense(f"{name}.intermediate.dense"), dense(f"{name}.output.dense")
        record(f"{tag} fc1_out", side.linear(x, *up))
        out = side.mlp(x, up[0], down[0], up[1], down[1], "gelu")
        record(f"{tag} mlp_out", out)
        x = side.layer_norm(x + out, *dense(f"{name}.output.LayerNorm"), c.eps)
        record(f"{tag} output", x)
    return x
