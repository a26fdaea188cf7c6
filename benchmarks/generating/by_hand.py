"""The batched loop that one writes by hand: plain torch, one forward a step for every sequence there is.

It shares the weights and, with `Paged`, the pages and the paged attention kernel of the model it is measured
beside; `Contiguous` keeps each sequence's keys and values in one piece and takes torch's own attention.
What a step needs is kept on the device and moved on in place; it is built anew only for who joins or leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from models.llama import Layer, Llama
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

import layerzero as lz
from layerzero.ops.host_copies import to_device_with_host_copy

Attention = Callable[..., Any]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of `x` (T, H, D) by the angles whose cosines and sines (T, 1, D / 2) are given."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Paged:
    """Keys and values in the model's own pages, one slot of a fixed batch a sequence.

    `attention(q, k_cache, v_cache, tables, lengths)` is what the measured side runs, taken from it.
    """

    def __init__(self, model: Llama, attention: Attention | None = None) -> None:
        self.model, self.cache = model, model.cache
        self.attention = attention or chosen_attention(model)

    def join(self, sequences: Sequence[Any], lengths: Sequence[int]) -> None:
        """Make `sequences`, each with so many tokens, the batch that steps from now on."""
        device = self.cache.device
        widest = max(len(sequence.pages) for sequence in sequences)
        self.block_tables = sequences[0].block_tables.gather([sequence.row for sequence in sequences], widest)
        self.counts = torch.tensor(lengths, dtype=torch.int32)
        self.positions = to_device_with_host_copy(self.counts.long(), device) - 1
        self.rows = torch.arange(len(sequences), device=device)
        self.width = 0

    def begin(self) -> None:
        """Give each sequence's next token its place."""
        size, device = self.cache.page_size, self.cache.device
        self.counts = self.counts + 1
        width = -(-int(self.counts.max()) // size)
        if width != self.width:
            self.width = width
            self.near = to_device_with_host_copy(self.block_tables[:, :width].contiguous(), device)
        self.lengths = to_device_with_host_copy(self.counts, device)
        self.positions = self.positions + 1
        page = self.near[self.rows, self.positions // size].long()
        self.slots = page * size + self.positions % size

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append one token a sequence and attend over all of its tokens."""
        layer.k_cache.flatten(0, 1).index_copy_(0, self.slots, k)
        layer.v_cache.flatten(0, 1).index_copy_(0, self.slots, v)
        out: Tensor = self.attention(q, layer.k_cache, layer.v_cache, self.near, self.lengths)
        return out


class Contiguous:
    """Keys and values of each sequence in one piece, padded to the longest; torch's own attention."""

    def __init__(self, model: Llama, slots: int, width: int) -> None:
        config, first = model.config, model.layers[0].k_cache
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, width, config.head_dim)
        self.model, self.device, self.width = model, first.device, width
        self.keys = torch.zeros(shape, dtype=first.dtype, device=first.device).normal_()
        self.values = torch.zeros_like(self.keys).normal_()
        self.grouped = config.num_attention_heads != config.num_key_value_heads

    def join(self, sequences: Sequence[Any], lengths: Sequence[int]) -> None:
        """Make the first slots, each with so many tokens, the batch that steps from now on."""
        self.lengths = torch.tensor(lengths).to(self.device)
        self.rows = torch.arange(len(lengths), device=self.device)
        self.places = torch.arange(self.width, device=self.device)
        self.longest = max(lengths)

    def begin(self) -> None:
        """Give each sequence's next token its place, and hide what is beyond it."""
        self.positions = self.lengths.clone()
        self.lengths += 1
        self.longest += 1
        self.seen = (self.places[: self.longest] < self.lengths[:, None])[:, None, None, :]

    def attend(self, index: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append one token a sequence and attend over all of its tokens."""
        keys, values, count = self.keys[index], self.values[index], len(self.rows)
        keys[self.rows, :, self.positions] = k
        values[self.rows, :, self.positions] = v
        out = scaled_dot_product_attention(
            q.unsqueeze(2),
            keys[:count, :, : self.longest],
            values[:count, :, : self.longest],
            attn_mask=self.seen,
            enable_gqa=self.grouped,
        )
        return out.squeeze(2)


def step(cache: Paged | Contiguous, ids: Tensor) -> Tensor:
    """The logits (B, V) after one token `ids` (B,) of every sequence of the batch."""
    model = cache.model
    config, layers = model.config, list[Any](model.layers)  # no weight here has codes
    cache.begin()
    cos, sin = (
        table[cache.positions].unsqueeze(1).to(model.embed_tokens.dtype)
        for table in (layers[0].cos, layers[0].sin)
    )
    x = model.embed_tokens[ids]
    normed = rms_norm(x, (config.hidden_size,), model.input_norm, config.rms_norm_eps)
    for index, layer in enumerate(layers):
        qkv = linear(normed, layer.w_qkv, layer.b_qkv)
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split(layer.split, dim=1)
        mixed = cache.attend(index, layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + layer.shares.reduce(linear(mixed.flatten(1), layer.w_o, layer.b_o))
        gate, up = linear(
            rms_norm(x, (config.hidden_size,), layer.post_attention_norm, config.rms_norm_eps),
            layer.w_up,
            layer.b_up,
        ).chunk(2, dim=-1)
        x = x + layer.shares.reduce(linear(silu(gate) * up, layer.w_down, layer.b_down))
        normed = rms_norm(x, (config.hidden_size,), layer.next_norm, config.rms_norm_eps)
    return linear(normed, model.lm_head)


def chosen_attention(model: Llama, sequences: int = 64, context: int = 2048) -> Attention:
    """The paged attention kernel that LayerZero takes for so many sequences, as a bare callable."""
    layer, config = model.layers[0], model.config
    like, device = layer.k_cache, model.cache.device
    q = torch.zeros(sequences, config.num_attention_heads, config.head_dim, dtype=like.dtype, device=device)
    tables = torch.zeros(sequences, -(-context // model.cache.page_size), dtype=torch.int32)
    lengths = torch.full((sequences,), context, dtype=torch.int32)
    bound: Attention = lz.bind(
        "paged_attention",
        q,
        like,
        layer.v_cache,
        to_device_with_host_copy(tables, device),
        to_device_with_host_copy(lengths, device),
        guard=False,
    )
    return bound
